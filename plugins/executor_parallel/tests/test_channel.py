"""Frames over a socket that takes them in pieces."""

from __future__ import annotations

import random
import socket

import pytest

from nanovllm_executor_parallel.messages import Channel, encode, receive


def test_messages_arrive_whole_and_in_order() -> None:
    """However long they are; no call of the engine's end waits for the other."""
    ours, theirs = socket.socketpair()
    channel, draw = Channel(ours), random.Random(0)
    sent = [draw.randbytes(draw.choice([0, 10, 1_000_000])) for _ in range(20)]
    for message in sent:
        channel.send(encode(message))
    assert channel.has_unsent, "a socket held it all: the test wants longer messages"
    received = []
    theirs.setblocking(False)
    other = Channel(theirs)
    while len(received) < len(sent):
        channel.flush()
        received += other.read()
    assert received == sent
    assert not channel.has_unsent


def test_the_last_messages_are_read_before_the_end() -> None:
    """What a rank sent before it ended is not lost."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(encode("last") + encode("words")[:-1])
    theirs.close()
    assert channel.read() == ["last"]
    assert channel.has_ended


def test_sending_to_one_that_has_ended_is_no_error() -> None:
    """Reading says so, behind its last message."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    channel.send(encode("plan"))
    assert not channel.has_unsent
    assert channel.read() == []
    assert channel.has_ended


def test_a_rank_reads_messages_and_sees_the_end() -> None:
    """The rank's end waits."""
    ours, theirs = socket.socketpair()
    ours.sendall(encode({"a": 1}))
    ours.close()
    assert receive(theirs) == {"a": 1}
    with pytest.raises(EOFError):
        receive(theirs)
