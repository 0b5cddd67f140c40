"""What --tool-parser and --reasoning-parser may be."""

import enum


class ToolParser(enum.StrEnum):
    """How a model family writes function calls."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    NONE = "none"


class ReasoningParser(enum.StrEnum):
    """How a model family marks what it thinks."""

    AUTO = "auto"
    THINK = "think"
    NONE = "none"
