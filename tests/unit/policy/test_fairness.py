"""What each tenant has had: charged by the token, level at a comeback, fading, bounded."""

import pytest

from disagg.core.errors import InternalFault
from disagg.policy.fairness import HALF_LIFE_S, MAX_IDLE, TenantService


def test_tokens_are_charged_and_fade_by_half() -> None:
    service = TenantService()
    service.arrive("a", 1e6)
    service.charge("a", 100, 1e6)
    assert service.services(1e6) == {"a": 100}
    assert service.services(1e6 + HALF_LIFE_S)["a"] == pytest.approx(50)
    service.charge("a", 100, 1e6 + HALF_LIFE_S)
    assert service.services(1e6 + HALF_LIFE_S)["a"] == pytest.approx(150)


def test_who_comes_starts_level_with_the_least_served() -> None:
    """An hour of idleness is no credit: the others would stand still until it was used up."""
    service = TenantService()
    for tenant in "ab":
        service.arrive(tenant, 0)
    service.charge("a", 900, 0)
    service.charge("b", 400, 0)
    service.arrive("c", 0)
    assert service.services(0) == {"a": 900, "b": 400, "c": 400}


def test_a_moment_of_idleness_does_not_clear_what_was_had() -> None:
    service = TenantService()
    for tenant in "ab":
        service.arrive(tenant, 0)
    service.charge("a", 900, 0)
    service.charge("b", 400, 0)
    service.leave("a")
    assert service.services(0) == {"b": 400}
    service.arrive("a", 0)
    assert service.services(0)["a"] == 900


def test_a_tenant_is_there_until_its_last_prompt_is_read() -> None:
    service = TenantService()
    service.arrive("a", 0)
    service.arrive("a", 0)
    service.leave("a")
    assert service.services(0) == {"a": 0}
    service.leave("a")
    assert service.services(0) == {}
    service.charge("a", 5, 0)  # its last chunk, after it was dropped
    assert service.services(0) == {}
    service.check_invariants()


def test_any_number_of_tenants_costs_bounded_memory() -> None:
    service = TenantService()
    for number in range(10 * MAX_IDLE):
        service.arrive(f"t{number}", number)
        service.charge(f"t{number}", 10, number)
        service.leave(f"t{number}")
        service.check_invariants()
    assert len(service) == MAX_IDLE


def test_what_a_tenant_has_beside_its_turns_counts_when_it_comes_back() -> None:
    service = TenantService()
    for tenant in "ab":
        service.arrive(tenant, 0)
    service.leave("a")
    service.charge("a", 100, 0)  # its answer grows
    service.charge("nobody", 100, 0)
    service.arrive("a", 0)
    assert service.services(0) == {"a": 100, "b": 0}
    assert service.had("a") > service.had("b") == service.had("nobody") == 0
    service.check_invariants()


def test_a_year_does_not_overflow() -> None:
    service, now_s = TenantService(), 0.0
    service.arrive("a", now_s)
    for _ in range(365):
        service.charge("a", 10**6, now_s)
        assert service.services(now_s)["a"] == pytest.approx(10**6)
        now_s += 86400
    service.check_invariants()


def test_the_bound_is_checked() -> None:
    service = TenantService()
    service.arrive("a", 0)
    service._num_open.clear()
    with pytest.raises(InternalFault):
        service.check_invariants()
