"""An operator's word to a router: let this worker finish and end."""

import asyncio

import msgspec

from disagg.channel.channel import dial
from disagg.channel.keys import Keys, load_keys
from disagg.core.errors import ConfigurationError, PeerFault
from disagg.core.ids import WorkerId
from disagg.protocol.messages import AnswerDrain, RequestDrain, RouterToWorker

ANSWER_TIMEOUT_S = 5.0

_DECODER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)


def ask_drain(worker_id: str, router_address: str, keys: str = "") -> None:
    """Returns when the worker has been told. Raises ConfigurationError: no router there, or no such worker."""
    asyncio.run(_ask(WorkerId(worker_id), router_address, load_keys(keys)))


async def _ask(worker_id: WorkerId, router_address: str, keys: Keys | None) -> None:
    try:
        channel = await dial(router_address, _DECODER, timeout_s=ANSWER_TIMEOUT_S, tls=keys.dialling if keys else None)
        try:
            channel.send(RequestDrain(worker_id))
            answer = await channel.receive(ANSWER_TIMEOUT_S)
        finally:
            await channel.close()
    except PeerFault as error:
        raise ConfigurationError(f"the router's control port: {error}; name it with --router-address") from None
    if not isinstance(answer, AnswerDrain):
        text = f"{router_address} answered with {type(answer).__name__}, which no router does"
        raise ConfigurationError(text)
    if answer.failure is not None:
        raise ConfigurationError(answer.failure.message)
