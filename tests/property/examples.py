"""How many examples a test of chance draws: few at every change, many with --hypothesis-profile thorough."""

from hypothesis import settings

DEV_EXAMPLES = 100  # what the profiles of tests/conftest.py are compared with


def examples(count: int) -> int:
    """`count` in the profile "dev", in proportion in others."""
    profile = settings.default
    assert profile is not None
    return max(1, count * profile.max_examples // DEV_EXAMPLES)
