"""One rank's process without a worker: its environment, its ends, and what it leaves behind."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.api import ExecutorError
from nanovllm_executor_parallel import process, ranks
from nanovllm_executor_parallel.messages import Start, encode
from nanovllm_executor_parallel.plugin import ParallelOptions
from nanovllm_executor_parallel.process import RankProcess
from nanovllm_executor_parallel.rank import failure
from nanovllm_executor_parallel.ranks import Ranks

PROGRAM = """
import os, pickle, signal, socket, subprocess, sys, time
sys.path[:] = sys.argv[5:]
from nanovllm_executor_parallel import rank
from nanovllm_executor_parallel.messages import CLOSE, LostPeerError, encode, receive

def run(sock, start, watcher, stack):
    {body}

rank.run = run
rank.main()
"""
MakeRanks = Callable[..., Ranks]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRanks]:
    """`make(body)`: ranks that do this instead of a worker's steps."""
    made = []

    def make_ranks(
        body: str, size: int = 1, program: str = PROGRAM, stall_seconds: float = 10
    ) -> Ranks:
        monkeypatch.setattr(process, "PROGRAM", program.replace("{body}", body))
        new = Ranks(ParallelOptions(stall_seconds=stall_seconds, close_seconds=5))
        made.append(new)
        for rank in range(size):
            one = RankProcess(rank, (), 1)
            new.add(one)
            one.messages.send(encode(Start(rank, size, b"", 0, None, 60, 10, "nccl", 30)))
        return new

    yield make_ranks
    for one in made:
        one.kill()


def first_message(all_ranks: Ranks) -> Any:
    """Of rank 0, within the bound of a start."""
    return all_ranks.receive(0, until=time.monotonic() + 20)


def wait_for_the_end(pid: int) -> None:
    """Gone, or a zombie that its new parent has not reaped yet."""
    until = time.monotonic() + 3
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < until, f"process {pid} is left behind"
        time.sleep(0.01)


def test_the_user_s_environment_opens_no_rank_to_the_network(
    make: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it switch NVLink multicast on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    one = make("sock.sendall(encode(dict(os.environ))); receive(sock)")
    assert process.ENVIRONMENT.items() <= first_message(one).items()


@pytest.mark.parametrize("how", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_s_end_is_seen_although_its_child_holds_the_sockets(
    make: MakeRanks, how: str
) -> None:
    """The child is a fork. It ends too."""
    fork = "child = os.fork() or time.sleep(60); sock.sendall(encode(child)); receive(sock); "
    one = make(fork + how)
    child = first_message(one)
    one.send("end")
    says = "exit code 7" if "exit" in how else "signal SIGKILL"
    with pytest.raises(ExecutorError, match=rf"^rank 0 \(process \d+\) ended with {says}"):
        one.receive(0)
    wait_for_the_end(child)


def test_programs_that_a_rank_starts_inherit_no_socket(make: MakeRanks) -> None:
    """`os.system` closes no descriptors by itself."""
    held = "[os.get_inheritable(fd) for fd in map(int, sys.argv[2:4])]"
    one = make(f"sock.sendall(encode({held})); receive(sock)")
    assert first_message(one) == [False, False]


KID = "kid = subprocess.Popen(['sleep', '60']); sock.sendall(encode(kid.pid)); "


@pytest.mark.parametrize("end", ["close", "kill", "rank killed", "rank raises", "engine gone"])
def test_no_child_of_a_rank_is_left_behind(make: MakeRanks, end: str) -> None:
    """However the rank ends."""
    all_ranks = make(KID + "assert receive(sock) == CLOSE")
    child = first_message(all_ranks)
    [one] = all_ranks
    if end == "close":
        all_ranks.close()
    elif end == "kill":
        all_ranks.kill()
    elif end == "engine gone":
        one.messages.close()
        one.watch.close()
    else:
        if end == "rank killed":
            os.kill(one.pid, signal.SIGKILL)
        else:
            all_ranks.send("not the end")
        with pytest.raises(ExecutorError, match=r"^rank 0"):
            all_ranks.receive(0)
    wait_for_the_end(child)


def test_a_rank_that_is_stopped_before_it_has_imported_anything_is_named(make: MakeRanks) -> None:
    """After `stall_seconds`, not after `start_seconds`."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    one, began = make("", program=program, stall_seconds=0.5), time.monotonic()
    with pytest.raises(ExecutorError, match=r"^rank 0 .*gave no answer for stall_seconds"):
        first_message(one)
    assert time.monotonic() - began < 3


def test_the_silence_of_a_rank_that_imports_is_no_failure(make: MakeRanks) -> None:
    """No thread of it may answer while a large library is loaded."""
    program = f"""
import os, sys, time
time.sleep(1)
os.write(int(sys.argv[2]), {encode("ready")!r})
time.sleep(60)
"""
    assert first_message(make("", program=program, stall_seconds=0.5)) == "ready"


def test_a_rank_that_sends_what_the_engine_cannot_read_is_named(make: MakeRanks) -> None:
    """As a type that only the rank can import does."""
    one = make("sock.sendall(bytes(7) + b'\\3' + b'bad'); receive(sock)")
    with pytest.raises(ExecutorError, match=r"^rank 0 .*sent what cannot be read: Unpickling"):
        first_message(one)
    assert not one.are_running


def test_of_ranks_that_lost_others_the_first_is_named(
    make: MakeRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its collective broke the others'. Rank 0 fails once rank 1 has."""
    monkeypatch.setattr(ranks, "CAUSE_SECONDS", 1.0)
    body = f"""
    if start.rank == 0:
        while not os.path.exists({str(tmp_path / "gone")!r}):
            time.sleep(0.01)
        time.sleep(0.05)
    else:
        open({str(tmp_path / "gone")!r}, "w").close()
    raise LostPeerError("gone")
"""
    with pytest.raises(ExecutorError, match=r"^rank 1 .*gone"):
        first_message(make(body, size=2))


class TwoArgumentsError(ExecutorError):
    """It pickles with both, and not with the one message that replaces them."""

    def __init__(self, used: int, limit: int) -> None:
        super().__init__(f"{used} of {limit}")
        self.args = used, limit


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TwoArgumentsError(3, 4), ExecutorError),
        (ExecutorError("3 of 4"), ExecutorError),
        (ValueError("3 of 4"), ExecutorError),
    ],
)
def test_every_error_survives_the_journey(error: Exception, kind: type[Exception]) -> None:
    """A type that does not arrives as an ExecutorError that names it."""
    copy = pickle.loads(pickle.dumps(failure(error, 5))).error
    assert type(copy) is kind
    assert str(copy).startswith(f"rank 5 (process {os.getpid()}): ")
    assert "3" in str(copy)
    assert isinstance(error, ExecutorError) or "ValueError" in str(copy)


def test_an_interrupted_message_still_goes_to_all_ranks(
    make: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the ranks would take different steps."""
    both = make("sock.sendall(encode(receive(sock))); receive(sock)", size=2, stall_seconds=2)
    with monkeypatch.context() as patch:
        patch.setattr(next(iter(both)).messages, "flush", interrupt)
        with pytest.raises(KeyboardInterrupt):
            both.send("plan")
    until = time.monotonic() + 20
    assert [both.receive(rank, until) for rank in (0, 1)] == ["plan", "plan"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_wait_whose_time_is_over_ends_at_once(make: MakeRanks) -> None:
    """`poll` takes a negative time for none: it would wait for the rank's end."""
    one, began = make("time.sleep(3)"), time.monotonic()
    one._poll(-1.0)
    assert time.monotonic() - began < 2
