"""The parts that a process's stages share: its incarnation, its ends of the planes, the inputs of its stages. Any
thread.

Made by `host`, which exchanges the planes when the process takes another incarnation (`wire`, `renew`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from stage_runtime.payloads import isolating
from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.channels import Channels
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.stage.inputs.stage_input import StageInput
from stage_runtime.stage.work import RequestWork
from stage_runtime.transfers.sending import SendQueues
from stage_runtime.wire.messages import Message


class ProcessContext:
    """One per process; it outlives the incarnations."""

    channels: Channels
    relays: Relays
    send_queues: SendQueues

    def __init__(self, incarnation: str, mutation_check: MutationCheck | None = None) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        #: Inputs of all stages of the process, by name; complete before any message.
        self.inputs: dict[str, StageInput] = {}
        self.mutation_check = mutation_check

    def wire(self, channels: Channels, relays: Relays) -> None:
        """Take the ends of the planes of this incarnation, before anything is sent."""
        self.channels = channels
        self.relays = relays
        self.send_queues = SendQueues(relays, channels.send, announce=channels.send_now)

    def sibling(self, name: str) -> StageInput | None:
        """The input of a stage of this process; None: it is not here."""
        return self.inputs.get(name)

    def send(self, peer: str, message: Message) -> bool:
        """False: this process has no link to ``peer``."""
        return self.channels.send(peer, message)

    def shared(self, source: str, target: str, work: RequestWork, value: Any, where: str) -> Any:
        """``value`` on its way to a sibling stage: checked, containers fresh, tensors shared.

        where: what a refusal calls it, the same as when it goes to another process.
        """
        isolated = isolating.isolate(value, where=where)
        if self.mutation_check is None:
            return isolated
        return self.mutation_check.passed(source, target, work.key, isolated, where)

    def measured(self, source: str, target: str, work: RequestWork, value: Any, where: str) -> tuple[Any, int]:
        """The result of `shared`, and roughly the number of bytes that would travel to another process."""
        isolation = isolating.Isolation()
        isolated = isolation.run(value, where)
        if self.mutation_check is not None:
            isolated = self.mutation_check.passed(source, target, work.key, isolated, where)
        return isolated, isolation.nbytes

    def began(self, stage: str) -> None:
        """Tells the mutation check that the stage begins, as `gave` and `ended` tell it what follows."""
        if self.mutation_check is not None:
            self.mutation_check.began(stage)

    def gave(self, stage: str, work: RequestWork, values: Mapping[str, Any]) -> None:
        """The stage has sent these values, by their names in a refusal, and may not write into them again."""
        if self.mutation_check is not None:
            self.mutation_check.gave(stage, work.key, values)

    def ended(self, stage: str, work: RequestWork) -> None:
        if self.mutation_check is not None:
            self.mutation_check.ended(stage, work.key)
