"""The life of a sequence on one worker, and of a request at the router, as tables."""

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
        (_S.RECEIVING, _T.FINISHED): _S.ENDED,  # a prefix for the index: nothing to decode
        (_S.RECEIVING, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.DECODING, _T.FINISHED): _S.ENDED,
        (_S.DECODING, _T.DROPPED): _S.ENDED,
        (_S.DECODING, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.HANDING_OFF, _T.FINISHED): _S.ENDED,
        (_S.HANDING_OFF, _T.DROPPED): _S.ENDED,
        (_S.HANDING_OFF, _T.DROPPED_IN_USE): _S.CLOSING,
        (_S.CLOSING, _T.RELEASED): _S.ENDED,
    },
)


class RequestState(enum.StrEnum):
    PLACED = "PLACED"  # workers have been told
    STREAMING = "STREAMING"  # at least one token has reached the router
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    ABORTED = "ABORTED"


class RequestTrigger(enum.StrEnum):
    TOKEN_RECEIVED = "token received"
    LAST_CHOICE_FINISHED = "last choice finished"
    SEQUENCE_FAILED = "sequence failed"
    CLIENT_GONE = "client gone"


_R, _RT = RequestState, RequestTrigger
REQUEST_TABLE: TransitionTable[RequestState, RequestTrigger] = TransitionTable(
    "request",
    _R.PLACED,
    {
        (_R.PLACED, _RT.TOKEN_RECEIVED): _R.STREAMING,
        (_R.PLACED, _RT.SEQUENCE_FAILED): _R.FAILED,
        (_R.PLACED, _RT.CLIENT_GONE): _R.ABORTED,
        (_R.STREAMING, _RT.TOKEN_RECEIVED): _R.STREAMING,
        (_R.STREAMING, _RT.LAST_CHOICE_FINISHED): _R.FINISHED,
        (_R.STREAMING, _RT.SEQUENCE_FAILED): _R.FAILED,
        (_R.STREAMING, _RT.CLIENT_GONE): _R.ABORTED,
    },
)
