"""`serve` of both facades: it blocks or returns, ends by signals, and ends before its engine does."""

import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import to_thread

from megallm import EngineDeadError, EngineStoppedError, ServeConfig
from megallm.http.serve_config import port_of
from tests.fake_llm import ANSWER_S, FakeAsyncLLM, FakeLLM, HeldRunner, greedy, lifecycle_config
from tests.fakes import continuation

LIMITS = lifecycle_config(num_blocks=512, max_sequence_length=1024)
HERE = partial(ServeConfig, host="127.0.0.1", frontend_replicas=0)


class HeldLLM(FakeLLM):
    """The sync facade round a fake model that a test can hold."""

    def __init__(self, *, use_coordinator: bool = True) -> None:
        """Starts, as the facade does."""
        self.runner = HeldRunner(LIMITS)
        super().__init__(LIMITS, self.runner, use_coordinator=use_coordinator)


def async_llm(**options: Any) -> FakeAsyncLLM:  # Any: FakeAsyncLLM's
    """Gives an async facade."""
    return FakeAsyncLLM(LIMITS, HeldRunner(LIMITS), **options)


def status_of(port: int, path: str = "/health") -> int:
    """Gives the status that a server answers; blocks until it does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with closing(error):
            return error.code


def expect_refused(port: int) -> None:
    """Fails unless nobody listens any more."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), ANSWER_S)


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """Gives the bytes of a request."""
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def bound() -> Generator[socket.socket]:
    """Gives a socket whose port is known before anybody serves it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


@contextmanager
def beside(work: Callable[[], None]) -> Generator[None]:
    """Does something on a thread while the block, on the main thread, is in `serve`."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)  # else the block would not end

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(ANSWER_S)
    assert not failures, failures


def test_a_server_that_does_not_block_answers_at_once_and_ends_with_its_engine() -> None:
    """A notebook goes on, and `shutdown` leaves nothing behind."""
    with HeldLLM() as engine:
        server = engine.serve(HERE(port=0), blocking=False)
        assert server is not None
        port = server.port
        assert status_of(port) == 200
        assert engine.generate([[1, 2]], greedy(8))[0].generated_tokens == continuation([1, 2], 8)
    expect_refused(port)
    server.stop()
    server.wait()


def test_a_server_may_be_stopped_alone_and_another_one_started() -> None:
    """The configuration changes, the model stays loaded."""
    with HeldLLM() as engine:
        for _ in range(2):
            server = engine.serve(HERE(port=0), blocking=False)
            assert server is not None
            assert status_of(server.port) == 200
            server.stop()
            expect_refused(server.port)
        assert engine.generate([[1]], greedy(4))[0].generated_tokens == continuation([1], 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_that_blocks_and_the_engine_runs_on(number: signal.Signals) -> None:
    """Ctrl-C and a supervisor's TERM mean the server; what follows `serve` in the script is still run."""
    before = signal.getsignal(number)
    with HeldLLM() as engine, bound() as sock:

        def interrupt() -> None:
            assert status_of(port_of(sock)) == 200
            os.kill(os.getpid(), number)

        sock.listen()
        with beside(interrupt):
            assert engine.serve(HERE(sock=sock)) is None
        assert signal.getsignal(number) is before
        assert engine.generate([[1]], greedy(4))[0].generated_tokens == continuation([1], 4)


def test_the_first_signal_is_told_and_no_other_one() -> None:
    """Whoever pressed Ctrl-C must see that it drains, once."""
    told: list[str] = []
    with HeldLLM() as engine:
        server = engine.serve(HERE(port=0), blocking=False)
        assert server is not None
        with server.stopping_on_signals(lambda: told.append("stopping")):
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            server.wait()
    assert told == ["stopping"]


def test_a_second_signal_cuts_what_the_first_one_waits_for() -> None:
    """Whoever presses Ctrl-C twice means it."""
    with HeldLLM() as engine, bound() as sock:
        runner, address = engine.runner, ("127.0.0.1", port_of(sock))
        runner.hold("step 20")
        sock.listen()

        def interrupt_twice() -> None:
            with (
                socket.create_connection(address, ANSWER_S) as idle,
                socket.create_connection(address, ANSWER_S) as busy,
            ):
                idle.sendall(request("GET", "/health"))
                came = b""
                while not came.endswith(b"}"):  # head and body are two writes
                    came += idle.recv(2**16)
                busy.sendall(request("POST", "/v1/completions", b'{"prompt": [1], "max_tokens": 900}'))
                assert runner.is_held.wait(ANSWER_S)
                os.kill(os.getpid(), signal.SIGTERM)
                assert not idle.recv(2**16)  # the drain has begun; two signals at once would be one
                os.kill(os.getpid(), signal.SIGTERM)
                answer = busy.recv(2**16)
                runner.go()
            assert answer.startswith(b"HTTP/1.1 503 "), answer

        with beside(interrupt_twice):
            engine.serve(HERE(sock=sock, drain_timeout_s=1000.0))


def test_the_engines_failure_is_raised_by_a_server_that_blocks() -> None:
    """The program ends with another code than 0, and its supervisor starts it again."""
    with HeldLLM() as engine, bound() as sock:
        engine.runner.break_at("step 3", RuntimeError("the device is on fire"))

        def ask() -> None:
            with pytest.raises(EngineDeadError):
                engine.generate([[1]], greedy(8))

        with beside(ask), pytest.raises(EngineDeadError, match="on fire"):
            engine.serve(HERE(sock=sock))


def test_what_can_not_be_served_is_refused_at_the_call() -> None:
    """Nothing is left running, and no port is kept."""
    with HeldLLM(use_coordinator=False) as direct, pytest.raises(ValueError, match="direct mode"):
        direct.serve(HERE(port=0))
    with HeldLLM() as engine, bound() as sock:
        port = port_of(sock)
        sock.listen()
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use"):
            engine.serve(HERE(port=port))
        with pytest.raises(TypeError, match=r"serve\(\) got a dict; give a megallm.ServeConfig"):
            engine.serve({"port": 0})  # type: ignore[arg-type] - a caller's mistake
    with pytest.raises(EngineStoppedError):
        engine.serve(HERE(port=0))


class OtherRank(FakeLLM):
    """The facade on a rank that serves nothing."""

    @property
    def is_primary_rank(self) -> bool:
        """See LLMBase."""
        return False


def test_other_ranks_serve_nothing_and_block_as_asked() -> None:
    """Every rank makes the call, and one of them has the port."""
    rank = OtherRank(LIMITS, HeldRunner(LIMITS))
    assert rank.serve(HERE(port=0), blocking=False) is None
    blocked = threading.Thread(target=rank.serve, args=(HERE(port=0),))
    blocked.start()
    rank.shutdown()
    blocked.join(ANSWER_S)
    assert not blocked.is_alive()


@pytest.mark.anyio
@pytest.mark.parametrize("is_native", [True, False])
async def test_the_async_facade_serves_on_either_loop(is_native: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """In the caller's own loop, or on the private one."""
    engine = async_llm()
    if is_native:
        await engine.__aenter__()
    server = await engine.serve(HERE(port=0), blocking=False)
    assert server is not None
    assert await to_thread.run_sync(status_of, server.port) == 200
    await server.aclose()
    await to_thread.run_sync(expect_refused, server.port)
    second = await engine.serve(HERE(port=0), blocking=False)
    assert second is not None
    if is_native:
        await engine.__aexit__(None, None, None)
    else:
        await engine.shutdown()
    await to_thread.run_sync(expect_refused, second.port)


@pytest.mark.anyio
async def test_a_signal_ends_the_async_facades_server() -> None:
    """The loop sleeps while nothing happens; the signal must wake it."""
    async with async_llm() as engine:
        with bound() as sock:
            sock.listen()

            def interrupt() -> None:
                assert status_of(port_of(sock)) == 200
                os.kill(os.getpid(), signal.SIGTERM)

            with beside(interrupt):
                assert await engine.serve(HERE(sock=sock)) is None


@pytest.mark.anyio
async def test_a_cancel_stops_the_async_facades_server_at_once() -> None:
    """It is a task like any other: it ends with its scope, and the engine stays."""
    async with async_llm() as engine:
        with bound() as sock:
            sock.listen()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.serve, HERE(sock=sock, drain_timeout_s=1000.0))
                assert await to_thread.run_sync(status_of, port_of(sock)) == 200
                tasks.cancel_scope.cancel()
        result = await engine.generate([1], greedy(4))
        assert not isinstance(result, list)
        assert result.generated_tokens == continuation([1], 4)
