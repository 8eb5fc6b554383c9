"""Load on an OpenAI-compatible endpoint over HTTP, and what its clients saw.

events     an event stream's bytes -> chunks, and the tokens of each
client     one request over HTTP: when each of its chunks came, or how it failed
load       one process: closed and open loops, and whether the process itself was late
processes  the same load shared by several processes that start together
summary    answers -> the record of a result file
measure    loads of one command, one after the other
timed      an endpoint whose times are known, to check this tool and others
"""
