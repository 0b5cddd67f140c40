"""Who is let in: by the model's limits, by what is open and promised already, and by who was here once."""

import msgspec
import pytest
from tests.unit.dispatch.rigs import MODEL, ROUTER, Desk, card, sent

from disagg.core.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.config import RETRY_AFTER_S, DispatcherConfig
from disagg.dispatch.gate import Gate
from disagg.dispatch.registry import Registry
from disagg.dispatch.stream import GenerateRequest
from disagg.protocol.messages import StartSequence
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import REJECTIONS


class Entrance:
    """A gate and the registry that it looks at."""

    def __init__(self) -> None:
        config = DispatcherConfig(ROUTER, {MODEL: "tok"}, max_open_requests=2, max_claimed_share=3.0)
        self.registry = Registry(config.tokenizer_digests, config.protocols)
        self.counters = Counters()
        self.now_s = 1000.0
        self.gate = Gate(config, self.registry, self.counters)

    def arrive(self, name: str, role: Role, *, num_blocks: int = 100, max_context: int = 200) -> None:
        made = card(name, role, num_blocks=num_blocks, max_context=max_context)
        self.registry.add(made, is_draining=False)
        self.gate.note_ready(MODEL)

    def leave(self, name: str) -> None:
        assert self.registry.remove(WorkerId(name), Incarnation(1))

    def ask(
        self, num_prompt: int = 10, max_tokens: int = 4, num_open: int = 0, *, is_open_ended: bool = False
    ) -> GenerateRequest:
        sampling = SamplingParams(max_tokens)
        request = GenerateRequest(MODEL, (1,) * num_prompt, sampling, is_open_ended=is_open_ended)
        return self.gate.checked(request, num_open, self.now_s)

    def rejections(self, reason: str) -> float:
        return self.counters.get(REJECTIONS, reason)


def test_what_can_be_served_comes_through_as_it_was() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED)
    request = GenerateRequest(MODEL, (1, 2), SamplingParams(4), num_choices=2)
    assert entrance.gate.checked(request, 1, 0.0) is request


def test_a_prompt_by_itself_may_fill_the_context() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED, max_context=200)
    full = GenerateRequest(MODEL, (1,) * 200, SamplingParams(1), is_prompt_only=True)
    assert entrance.gate.checked(full, 0, 0.0) is full
    for refused in (
        msgspec.structs.replace(full, is_prompt_only=False),
        msgspec.structs.replace(full, prompt_ids=(1,) * 201),
    ):
        with pytest.raises(InvalidRequest, match="200"):
            entrance.gate.checked(refused, 0, 0.0)


def test_a_model_nobody_has_ever_served_is_not_waited_for() -> None:
    entrance = Entrance()
    with pytest.raises(Unavailable, match="no worker has registered") as caught:
        entrance.ask()
    assert caught.value.retry_after_s == RETRY_AFTER_S
    entrance.arrive("d0", Role.DECODE)  # half of what is needed
    entrance.leave("d0")
    with pytest.raises(Unavailable, match="no worker has registered"):
        entrance.ask()
    assert entrance.rejections("unavailable") == 2


def test_workers_that_were_here_come_back_so_requests_may_wait() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED)
    entrance.leave("m0")
    assert entrance.ask().sampling.max_tokens == 4
    with pytest.raises(InvalidRequest, match="200"):  # and what they could never serve need not wait
        entrance.ask(num_prompt=200)


def test_the_limits_of_those_that_are_here_count_before_remembered_ones() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED, max_context=200)
    entrance.leave("m0")
    entrance.arrive("m1", Role.MIXED, max_context=50)
    with pytest.raises(InvalidRequest, match="50"):
        entrance.ask(num_prompt=60)
    entrance.leave("m1")
    with pytest.raises(InvalidRequest, match="50"):  # the last that could serve
        entrance.ask(num_prompt=60)


def test_an_open_end_goes_as_far_as_the_remembered_limits() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED, num_blocks=10)
    entrance.leave("m0")
    assert entrance.ask(max_tokens=10**6, is_open_ended=True).sampling.max_tokens == 31
    assert entrance.ask(max_tokens=7, is_open_ended=True).sampling.max_tokens == 7


def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    entrance = Entrance()
    with pytest.raises(ModelNotFound, match=f"'x'.*{MODEL}") as caught:
        entrance.gate.checked(GenerateRequest("x", (1,), SamplingParams(1)), 0, 0.0)
    assert caught.value.code == "model_not_found"


def test_the_number_of_open_requests_is_limited() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED)
    entrance.ask(num_open=1)
    with pytest.raises(Overloaded, match="2 requests are open, the limit is 2"):
        entrance.ask(num_open=2)
    assert entrance.rejections("too_many_requests") == 1


def test_more_than_the_allowed_share_of_promised_kv_is_an_overload_with_the_numbers() -> None:
    entrance = Entrance()
    entrance.arrive("m0", Role.MIXED, num_blocks=10)
    record = entrance.registry.get(WorkerId("m0"))
    assert record is not None
    record.claim(SequenceId(entrance_id(), 0), 29)
    entrance.ask()
    record.claim(SequenceId(entrance_id(), 1), 1)
    with pytest.raises(Overloaded, match=r"3\.0 times the KV there is, the limit is 3;") as caught:
        entrance.ask()
    assert caught.value.retry_after_s >= 1.0
    assert entrance.rejections("overloaded") == 1


def entrance_id() -> RequestId:
    return RequestId(ROUTER, 0)


def test_a_worker_with_room_lets_more_in() -> None:
    desk = Desk(max_claimed_share=1.0)
    desk.register(card("m0", Role.MIXED, num_blocks=5))
    desk.submit(num_prompt=17)  # 5 blocks
    with pytest.raises(Overloaded):
        desk.submit()
    desk.register(card("m1", Role.MIXED, num_blocks=5))
    _, actions = desk.submit()
    assert [name for name, _ in sent(StartSequence, actions)] == ["m1"]


def test_a_request_without_any_worker_is_taken_and_waits() -> None:
    desk = Desk().with_pair()
    for name in ("p0", "d0"):
        desk.lose(name)
    request_id, actions = desk.submit()
    assert actions == []
    assert not desk.choice(request_id).is_placed
    assert desk.dispatcher.next_wake_s() == desk.now_s + desk.dispatcher.config.recovery.max_unplaced_s


def test_the_front_knows_a_models_context_while_its_workers_are_away() -> None:
    """Or it would turn away what may wait for them."""
    desk = Desk().with_pair()
    before = {status.model: status for status in desk.dispatcher.models()}[MODEL]
    desk.lose("d0")
    desk.lose("p0")
    after = {status.model: status for status in desk.dispatcher.models()}[MODEL]
    assert not after.is_ready
    assert after.max_context == before.max_context is not None
