"""Flags that several commands share: one name, one help text."""

from typing import Annotated

import typer

from disagg.core.endpoints import TransportChoice
from disagg.core.formats import Kernels, KvDtype, KvWire, Weights
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart
from disagg.router.config import API_KEYS_VARIABLE
from disagg.router.parser_names import ReasoningParser, ToolParser

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
ServedName = Annotated[
    str, typer.Option(help="What clients call the model. Default: made from MODEL.", rich_help_panel=MODEL)
]
MaxContext = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus answer, tokens. Default: what the model allows.", rich_help_panel=MODEL),
]
NumericsOption = Annotated[
    Numerics,
    typer.Option("--numerics", help="exact: a moved sequence goes on bit by bit the same.", rich_help_panel=MODEL),
]

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=POOLS)]
Cores = Annotated[str, typer.Option(help="Pin to these cores, such as 0,2,4-7. Empty: free.", rich_help_panel=POOLS)]
Niceness = Annotated[
    int, typer.Option(help="How far its processor time goes to others first, 0 to 19.", rich_help_panel=POOLS)
]
NumThreads = Annotated[
    int | None,
    typer.Option(help="Threads for arithmetic, per worker. Default: its share of the cores.", rich_help_panel=POOLS),
]

Host = Annotated[str, typer.Option(help="Address for HTTP.", rich_help_panel=NETWORK)]
Port = Annotated[int, typer.Option(help="Port for HTTP; 0: any free one.", rich_help_panel=NETWORK)]
ControlHost = Annotated[str, typer.Option(help="Address where workers register.", rich_help_panel=NETWORK)]
ControlPort = Annotated[
    int, typer.Option(help="Port where workers register; 0: any free one.", rich_help_panel=NETWORK)
]
MaxBodyBytes = Annotated[
    str, typer.Option("--max-body-bytes", help="Largest request body, such as 8M.", rich_help_panel=NETWORK)
]
MaxJsonDepth = Annotated[int, typer.Option(help="Deepest nesting of a body's JSON.", rich_help_panel=NETWORK)]
HeaderTimeoutS = Annotated[
    float, typer.Option(help="Seconds a client gets to send its headers.", rich_help_panel=NETWORK)
]
BodyTimeoutS = Annotated[float, typer.Option(help="Seconds a client gets to send its body.", rich_help_panel=NETWORK)]
WriteTimeoutS = Annotated[
    float, typer.Option(help="Seconds a client gets to read what waits for it.", rich_help_panel=NETWORK)
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=API_KEYS_VARIABLE,
        show_envvar=True,
        help="A key that clients must send; may be given again. None and no file: nobody needs one.",
        rich_help_panel=ACCESS,
    ),
]
ApiKeysFile = Annotated[str, typer.Option(help="TOML file with keys and what each may do.", rich_help_panel=ACCESS)]
TlsCert = Annotated[str, typer.Option(help="PEM certificate: HTTPS instead of HTTP.", rich_help_panel=ACCESS)]
TlsKey = Annotated[str, typer.Option(help="PEM private key of --tls-cert.", rich_help_panel=ACCESS)]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", help="Origin whose pages may ask, or '*'; may be given again.", rich_help_panel=ACCESS
    ),
]
MaxOpenRequests = Annotated[
    int, typer.Option(help="Requests in flight; one more gets HTTP 429.", rich_help_panel=NETWORK)
]
MaxQueueS = Annotated[
    float,
    typer.Option(help="Seconds a request may queue without a token; then HTTP 503.", rich_help_panel=NETWORK),
]
ToolParserOption = Annotated[
    ToolParser,
    typer.Option(help="How models write function calls; auto: by their chat templates.", rich_help_panel=MODEL),
]
ReasoningParserOption = Annotated[
    ReasoningParser,
    typer.Option(help="Whether <think>…</think> is taken out of answers; auto: by templates.", rich_help_panel=MODEL),
]

DecisionLogFile = Annotated[
    str,
    typer.Option(
        "--decision-log",
        metavar="PATH",
        help="Write every event and routing decision to this file, token ids included.",
        rich_help_panel=LIFE,
        show_default=False,
    ),
]

KeepTimelines = Annotated[
    int, typer.Option(help="Requests whose timelines are kept, for GET /timeline; 0: none.", rich_help_panel=LIFE)
]
Otel = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Export traces over OTLP; the OTEL_ variables say where. Needs disagg[otel].",
        rich_help_panel=LIFE,
    ),
]

WeightsOption = Annotated[
    Weights,
    typer.Option("--weights", help="How weights are stored.", rich_help_panel=POOLS),
]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        help="Whose code computes; auto: native where it can be had. "
        "portable: the bits of every x86-64 CPU, for exact numerics between CPUs with AMX and without.",
        rich_help_panel=POOLS,
    ),
]
KvDtypeOption = Annotated[KvDtype, typer.Option("--kv-dtype", help="Numbers of the KV cache.", rich_help_panel=MEMORY)]
KvMemory = Annotated[
    str, typer.Option("--kv-memory", help="KV cache per worker, such as 512M or 2G.", rich_help_panel=MEMORY)
]
NumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks per worker; overrides --kv-memory.", rich_help_panel=MEMORY)
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=MEMORY)]

ChunkTokens = Annotated[int, typer.Option(help="Most prompt tokens per step.", rich_help_panel=STEPS)]
MixedChunkTokens = Annotated[
    int,
    typer.Option(
        help="Prompt tokens per step beside running answers, while step times are not known or have no target.",
        rich_help_panel=STEPS,
    ),
]
ItlTargetS = Annotated[
    float,
    typer.Option(
        help="Prompts beside running answers fill steps up to this many predicted seconds; 0: no target.",
        rich_help_panel=STEPS,
    ),
]
MaxRunning = Annotated[int, typer.Option(help="Sequences in one step.", rich_help_panel=STEPS)]

LocalPrefillTokens = Annotated[
    int,
    typer.Option(
        help="Prompts with at most this many uncached tokens are read by the decode worker; 0: never.",
        rich_help_panel=HANDOFF,
    ),
]
Handoff = Annotated[
    HandoffMode,
    typer.Option(
        "--handoff", help="layerwise: KV is sent while it is computed; sync: after the prompt.", rich_help_panel=HANDOFF
    ),
]
PartialStartOption = Annotated[
    PartialStart,
    typer.Option(
        "--partial-start",
        help="auto: over slow links a first step begins, alone, with the layers that are here; off: when all are.",
        rich_help_panel=HANDOFF,
    ),
]
FirstTokenOption = Annotated[
    FirstToken,
    typer.Option(
        "--first-token",
        help="Of an answer that is handed over. at-once: told by the prefill worker. "
        "steady: by the decode worker when the step for the second begins, so that no gap is longer than a step.",
        rich_help_panel=HANDOFF,
    ),
]
MinPushBytes = Annotated[
    str, typer.Option("--min-push-bytes", help="Smallest push of KV, such as 256K.", rich_help_panel=HANDOFF)
]
TransportOption = Annotated[
    TransportChoice,
    typer.Option(
        "--transport", help="auto: shared memory between neighbours, else TCP; tcp: always.", rich_help_panel=HANDOFF
    ),
]
KvWireOption = Annotated[
    KvWire,
    typer.Option(
        "--kv-wire",
        help="KV between workers: native as it is stored; int8 in fewer bytes, with --numerics bounded.",
        rich_help_panel=HANDOFF,
    ),
]
LeaseS = Annotated[
    float, typer.Option(help="Seconds KV is kept for a peer that is not heard of.", rich_help_panel=HANDOFF)
]

ProgressTimeoutS = Annotated[
    float,
    typer.Option(help="Seconds without a finished layer after which a worker ends itself.", rich_help_panel=LIFE),
]
DrainTimeoutS = Annotated[
    float, typer.Option(help="Seconds for what runs, once a worker is told to end.", rich_help_panel=LIFE)
]
BeatIntervalS = Annotated[
    float, typer.Option(help="Seconds between two heartbeats; a peer silent for two is lost.", rich_help_panel=LIFE)
]

Keys = Annotated[
    str,
    typer.Option(
        "--keys", help="Directory made by `disagg keys`: talk to each other under mutual TLS.", rich_help_panel=NETWORK
    ),
]
DataConnections = Annotated[
    int, typer.Option(help="TCP connections from a worker to each peer.", rich_help_panel=HANDOFF)
]
ProbeS = Annotated[
    float,
    typer.Option(help="Seconds spent on measuring each link when two workers meet; 0: none.", rich_help_panel=HANDOFF),
]
LinkGbits = Annotated[
    float,
    typer.Option(help="What a link should give, Gbit/s; 0: what the network card says.", rich_help_panel=HANDOFF),
]
RouterAddress = Annotated[str, typer.Option(help="host:port of the router's control port.", rich_help_panel=NETWORK)]
MetricsHost = Annotated[
    str,
    typer.Option(help="Address of this worker's own /metrics; it asks nobody who he is.", rich_help_panel=LIFE),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Port of this worker's own /metrics; 0: any free one. Default: none, the router shows all workers'.",
        rich_help_panel=LIFE,
        show_default=False,
    ),
]
