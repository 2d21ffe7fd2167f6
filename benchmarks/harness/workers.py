"""Alternates between timing builds or libraries that cannot share a process, one process each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence


class Worker:
    """A program that answers a question per line, both in JSON; see :func:`serve`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def send(self, question: str, *arguments: object) -> None:
        print(json.dumps([question, *arguments]), file=self._process.stdin, flush=True)

    def receive(self) -> object:
        """Returns the next answer.

        Raises:
            RuntimeError: the answer is an error, or the worker ended, whose standard error has the
                reason.
        """
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker {self.name} ended with {self._process.wait()}")
        error, answer = json.loads(line)
        if error:
            raise RuntimeError(f"the worker {self.name}: {error}")
        return answer

    def ask(self, question: str, *arguments: object) -> object:
        with contextlib.suppress(BrokenPipeError):  # receive() reports how the worker ended
            self.send(question, *arguments)
        return self.receive()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve(**answers: Callable[..., object]) -> None:
    """Answers a parent's questions, each by the function of its name, until the input ends.

    The output of libraries is redirected to the standard error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question, *arguments = json.loads(line)
        try:
            answer = (None, answers[question](*arguments))
        except RuntimeError as error:  # out of memory, or a problem not supported by this build
            answer = (str(error), None)
        print(json.dumps(answer), file=replies, flush=True)


def alternate(
    workers: Sequence[Worker], case: int, rounds: int
) -> tuple[list[object], list[dict[str, list[list[float]]]]]:
    """Returns each worker's answer on a case, and its samples: by pass, a list for each round."""
    facts = [worker.ask("prepare", case) for worker in workers]
    samples: list[dict[str, list[list[float]]]] = [{} for _ in workers]
    for number in range(rounds):
        turn = list(zip(workers, samples, strict=True))
        for worker, own in turn if number % 2 == 0 else reversed(turn):
            for which, values in worker.ask("measure").items():
                own.setdefault(which, []).append(values)
    return facts, samples
