"""A federation in one process: Flower's messages between the real strategy and the real ClientApp, without a network.

For tests, and to try an app out under a debugger. Every message is written to bytes and read again on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Bytes
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE = 1


class LocalGrid(Grid):
    """Nodes that answer one after the other. Node ``1000 + j`` is client j, unless told otherwise.

    Args:
        app: the ClientApp of all nodes.
        run_config: the app's settings.
        nodes: the --node-config of each node.
    """

    def __init__(self, app: ClientApp, run_config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER_NODE, 1
        self.app = app
        self.contexts = {
            1000 + number: Context(1, 1000 + number, dict(config), RecordDict(), dict(run_config))
            for number, config in enumerate(nodes)
        }
        self._replies: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Run) -> None:
        """There is one run, without a name."""

    @property
    def run(self) -> Run:
        raise NotImplementedError("A local grid has no run.")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            self._sent += 1
            names.append(str(self._sent))
            message.metadata.__dict__["_message_id"] = names[-1]
            for reply in self.answer(message):
                self._replies[names[-1]] = reply
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> list[Message]:
        """What a node says to a message; nothing, if it is not there."""
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return []
        received = over_the_wire(message)
        try:
            return [over_the_wire(self.app(received, context))]
        except Exception as error:  # as a SuperNode does with an app that fails
            reason = f"{type(error).__name__}: {error}"
            return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=received)]


def over_the_wire(message: Message) -> Message:
    """The message as the other side reads it."""
    return message_from_proto(Bytes.FromString(message_to_proto(message).SerializeToString()))
