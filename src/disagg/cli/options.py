"""What flags of different structs and commands have in common: headings of --help, and flags of both ends."""

from typing import Annotated

import typer

MODEL = "Model"
POOLS = "Workers"
NETWORK = "Addresses"
ACCESS = "Access"
MEMORY = "Memory"
STEPS = "Batching"
HANDOFF = "Hand-off"
LIFE = "Life signs"

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="'smollm2' (fetched once), a GGUF file, or a Hugging Face directory.", show_default=False
    ),
]
ControlPort = Annotated[
    int, typer.Option(help="Port where workers register; 0: any free one.", rich_help_panel=NETWORK)
]
RouterAddress = Annotated[
    str,
    typer.Option(
        "--router-address", "--router", help="host:port of the router's control port.", rich_help_panel=NETWORK
    ),
]
Keys = Annotated[
    str,
    typer.Option(
        "--keys", help="Directory made by `disagg keys`: talk to each other under mutual TLS.", rich_help_panel=NETWORK
    ),
]
BeatIntervalS = Annotated[
    float, typer.Option(help="Seconds between two heartbeats; a peer silent for two is lost.", rich_help_panel=LIFE)
]
