"""The life of a sequence on one worker, and of one choice of a request at the router, as tables."""

import enum

from disagg.protocol.table import TransitionTable


class SequenceState(enum.StrEnum):
    WAITING = "WAITING"  # no blocks yet; asked for a reservation where the KV goes to a peer
    PREFILLING = "PREFILLING"  # prompt tokens are being computed here
    RECEIVING = "RECEIVING"  # prompt KV is coming from a peer
    DECODING = "DECODING"
    HANDING_OFF = "HANDING_OFF"  # computed; the peer does not have all of it yet
    CLOSING = "CLOSING"  # over, but a step or a write still uses its blocks
    ENDED = "ENDED"


class SequenceTrigger(enum.StrEnum):
    BLOCKS_ALLOCATED = "blocks allocated"
    BLOCKS_RESERVED = "blocks reserved"
    PROMPT_COMPUTED = "prompt computed"
    PROMPT_COMPUTED_FOR_PEER = "prompt computed for peer"
    KV_COMPLETE = "KV complete"
    FINISHED = "finished"
    DROPPED = "dropped"  # aborted or failed, nothing in use
    DROPPED_IN_USE = "dropped in use"
    RELEASED = "released"
    PREEMPTED = "preempted"  # its blocks went to an older sequence; it starts over by reading what it has written


_S, _T = SequenceState, SequenceTrigger
SEQUENCE_TABLE: TransitionTable[SequenceState, SequenceTrigger] = TransitionTable(
    "sequence",
    _S.WAITING,
    {
        (_S.WAITING, _T.BLOCKS_ALLOCATED): _S.PREFILLING,
        (_S.WAITING, _T.BLOCKS_RESERVED): _S.RECEIVING,
        (_S.WAITING, _T.DROPPED): _S.ENDED,
        (_S.PREFILLING, _T.PROMPT_COMPUTED): _S.DECODING,
        (_S.PREFILLING, _T.PROMPT_COMPUTED_FOR_PEER): _S.HANDING_OFF,
        (_S.PREFILLING, _T.DROPPED): _S.ENDED,
        (_S.PREFILLING, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.RECEIVING, _T.KV_COMPLETE): _S.DECODING,
        (_S.RECEIVING, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.DECODING, _T.FINISHED): _S.ENDED,
        (_S.DECODING, _T.PREEMPTED): _S.WAITING,
        (_S.DECODING, _T.DROPPED): _S.ENDED,
        (_S.DECODING, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.HANDING_OFF, _T.FINISHED): _S.ENDED,
        (_S.HANDING_OFF, _T.DROPPED): _S.ENDED,
        (_S.HANDING_OFF, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.CLOSING, _T.RELEASED): _S.ENDED,
    },
)


class ChoiceState(enum.StrEnum):
    UNPLACED = "UNPLACED"  # no worker has it: just opened, or its worker failed
    PLACED = "PLACED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    ABORTED = "ABORTED"


class ChoiceTrigger(enum.StrEnum):
    WORKERS_TOLD = "workers told"
    WORKER_FAILED = "worker failed"
    ANSWER_ENDED = "answer ended"  # by its last token or a stop string
    GIVEN_UP = "given up"
    CLIENT_GONE = "client gone"


_C, _CT = ChoiceState, ChoiceTrigger
CHOICE_TABLE: TransitionTable[ChoiceState, ChoiceTrigger] = TransitionTable(
    "choice",
    _C.UNPLACED,
    {
        (_C.UNPLACED, _CT.WORKERS_TOLD): _C.PLACED,
        (_C.UNPLACED, _CT.ANSWER_ENDED): _C.FINISHED,  # by a token that was on its way when the worker failed
        (_C.UNPLACED, _CT.GIVEN_UP): _C.FAILED,
        (_C.UNPLACED, _CT.CLIENT_GONE): _C.ABORTED,
        (_C.PLACED, _CT.WORKER_FAILED): _C.UNPLACED,
        (_C.PLACED, _CT.ANSWER_ENDED): _C.FINISHED,
        (_C.PLACED, _CT.GIVEN_UP): _C.FAILED,
        (_C.PLACED, _CT.CLIENT_GONE): _C.ABORTED,
    },
)
