"""`python -m nanovllm_core`: the same as the command `nanovllm`."""

from nanovllm_core.cli.main import main

main()
