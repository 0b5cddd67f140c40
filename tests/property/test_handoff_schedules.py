"""Seeded schedules of the hand-off tables with a link that loses, repeats, delays, reorders and breaks."""

import os

from disagg.testing.handoff_world import HandoffWorld

NUM_WORLDS = int(os.environ.get("DISAGG_WORLDS", "200"))


def test_no_schedule_breaks_a_rule() -> None:
    """Rules after every event; no token in a wrong place; every block free or cached at the end."""
    handed_over = num_parts = 0
    for seed in range(NUM_WORLDS):
        world = HandoffWorld(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        handed_over += world.num_handed_over
        num_parts += world.num_parts
    assert handed_over > NUM_WORLDS / 3  # they do not all fail
    assert num_parts > NUM_WORLDS / 20  # of first steps that began before all KV was there


def test_equal_prompts_share_the_blocks_of_their_answers() -> None:
    """Seed 59384: two prompts of one equal token; the second goes on in the first one's block."""
    HandoffWorld(59384).run()
