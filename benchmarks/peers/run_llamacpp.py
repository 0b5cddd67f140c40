"""Runner: llama.cpp by its C interface. --model is a GGUF file; --kind the Python package that brings the library.

Only what has long been stable is described here: the first four numbers of the context's parameters and the batch.
Streams of a context are apart (as a server with slots has them), each with KV of its own; the first one's prompt is
read once and copied to the others.
"""

import ctypes
import glob
import importlib.metadata
import os
import sysconfig
from collections.abc import Sequence

import line_loop
import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]

MAX_ROWS = 16
SPARE_TOKENS = 256  # room for steps behind a context
MAX_BATCH = 2048  # tokens of one call: llama.cpp's own default
PARAMETER_BYTES = 1024  # more than any version's parameters have
LIBRARIES = {"xllamacpp": "xllamacpp/xllamacpp*.so", "llama-cpp-python": "llama_cpp/lib/libllama.so"}


class ModelParameters(ctypes.Structure):
    _fields_ = (("rest", ctypes.c_uint64 * (PARAMETER_BYTES // 8)),)


class ContextParameters(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * (PARAMETER_BYTES // 8)),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def load_library(package: str) -> ctypes.CDLL:
    pattern = os.path.join(sysconfig.get_path("platlib"), LIBRARIES[package])
    found = glob.glob(pattern)
    if not found:
        raise SystemExit(f"no library {pattern}")
    library = ctypes.CDLL(found[0])
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "llama_model_default_params": (ModelParameters,),
        "llama_context_default_params": (ContextParameters,),
        "llama_model_load_from_file": (pointer, ctypes.c_char_p, ModelParameters),
        "llama_init_from_model": (pointer, pointer, ContextParameters),
        "llama_set_n_threads": (None, pointer, number, number),
        "llama_batch_init": (Batch, number, number, number),
        "llama_decode": (number, pointer, Batch),
        "llama_synchronize": (None, pointer),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), pointer, number),
        "llama_get_memory": (pointer, pointer),
        "llama_memory_clear": (None, pointer, ctypes.c_bool),
        "llama_memory_seq_rm": (ctypes.c_bool, pointer, number, number, number),
        "llama_memory_seq_cp": (None, pointer, number, number, number, number),
        "llama_model_get_vocab": (pointer, pointer),
        "llama_vocab_n_tokens": (number, pointer),
        "llama_model_size": (ctypes.c_uint64, pointer),
        "llama_print_system_info": (ctypes.c_char_p,),
        "llama_log_set": (None, pointer, pointer),
        "llama_backend_init": (None,),
    }
    for name, (result, *parameters) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class Context:
    """One llama_context with num_rows streams of row_tokens each."""

    def __init__(self, library: ctypes.CDLL, model: int, num_rows: int, row_tokens: int, num_threads: int) -> None:
        self._library = library
        parameters = library.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = num_rows * row_tokens, num_rows
        parameters.n_batch = MAX_BATCH
        self._context = library.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError(f"no context of {num_rows} x {row_tokens} tokens")
        library.llama_set_n_threads(self._context, num_threads, num_threads)
        self._memory = library.llama_get_memory(self._context)
        self._batch = library.llama_batch_init(MAX_BATCH, 0, 1)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def step(self, rows: Sequence[tuple[int, Sequence[int], int]], all_scores: bool = False) -> list[Scores]:
        """Compute (stream, ids, position) rows; scores [rows or tokens, vocab_size], a view until the next step."""
        place, wanted = 0, list[int]()
        for stream, ids, position in rows:
            for offset, token in enumerate(ids):
                is_wanted = all_scores or offset == len(ids) - 1
                self._batch.token[place], self._batch.pos[place] = token, position + offset
                self._batch.n_seq_id[place], self._batch.seq_id[place][0] = 1, stream
                self._batch.logits[place] = is_wanted
                wanted += [place] if is_wanted else []
                place += 1
        self._batch.n_tokens = place
        code = self._library.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode answered {code}")
        self._library.llama_synchronize(self._context)
        shape = (self._vocab_size,)
        return [np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, i), shape) for i in wanted]

    def read(self, stream: int, ids: Sequence[int]) -> Scores:
        """A whole prompt; the scores of its last place."""
        scores: list[Scores] = []
        for start in range(0, len(ids), MAX_BATCH):
            scores = self.step([(stream, ids[start : start + MAX_BATCH], start)])
        return scores[0]

    def clear(self) -> None:
        self._library.llama_memory_clear(self._memory, True)

    def fill(self, ids: Sequence[int]) -> None:
        """The prompt in the first stream, its copy in all others of num_rows."""
        self.clear()
        self.read(0, ids)

    def copy(self, num_rows: int) -> None:
        for stream in range(1, num_rows):
            self._library.llama_memory_seq_rm(self._memory, stream, -1, -1)
            self._library.llama_memory_seq_cp(self._memory, 0, stream, -1, -1)

    def cut(self, stream: int, length: int) -> None:
        self._library.llama_memory_seq_rm(self._memory, stream, length, -1)


class Engine:
    def __init__(self, options: line_loop.Options) -> None:
        self._options = options
        self._library = load_library(options.kind)
        self._library.llama_log_set(ctypes.cast(SILENT, ctypes.c_void_p), None)
        self._library.llama_backend_init()
        parameters = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(self._options.model.encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {self._options.model}")
        self._prompts: line_loop.Tokens = []
        self._is_filled: set[int] = set()
        self._contexts: dict[tuple[int, int], Context] = {}

    def _context(self, num_rows: int, row_tokens: int) -> Context:
        """Made once for each size."""
        key = (num_rows, row_tokens)
        if key not in self._contexts:
            self._contexts[key] = Context(self._library, self._model, num_rows, row_tokens, self._options.threads)
        return self._contexts[key]

    def hello(self) -> line_loop.Hello:
        system = self._library.llama_print_system_info().decode()
        flags = [part.split("=")[0].strip() for part in system.replace("CPU :", "").split("|") if "= 1" in part]
        return line_loop.Hello(
            engine="llama.cpp",
            version=f"{self._options.kind} {importlib.metadata.version(self._options.kind)}",
            precision=os.path.basename(self._options.model).removesuffix(".gguf").rpartition("-")[2],
            kv="float16",
            weight_bytes=self._library.llama_model_size(self._model),
            note=" ".join(flags),
        )

    def contexts(self, tokens: line_loop.Tokens) -> float:
        self._prompts = tokens
        return 0.0

    def prefill(self, tokens: line_loop.Tokens) -> float:
        at = self._context(1, MAX_BATCH + SPARE_TOKENS)
        at.clear()
        return line_loop.timed(lambda: int(at.read(0, tokens[0]).argmax()))[0]

    def decode(self, batch: int, context: int, steps: int) -> float:
        at = self._context(MAX_ROWS, context + SPARE_TOKENS)
        if context not in self._is_filled:
            at.fill(self._prompts[0][:context])
            self._is_filled.add(context)
        at.cut(0, context)
        at.copy(batch)

        def go_on(first: int, last: Sequence[int], count: int) -> Sequence[int]:
            for position in range(first, first + count):
                rows = [(row, [token], position) for row, token in enumerate(last)]
                last = [int(scores.argmax()) for scores in at.step(rows)]
            return last

        tokens = go_on(context, range(100, 100 + batch), 1)
        return line_loop.timed(lambda: go_on(context + 1, tokens, steps))[0]

    def quality(self, tokens: line_loop.Tokens, path: str) -> float:
        at = self._context(len(tokens), -(-len(tokens[0]) // 256) * 256)
        at.clear()
        rows = [(stream, ids, 0) for stream, ids in enumerate(tokens)]
        seconds, scores = line_loop.timed(lambda: at.step(rows, all_scores=True))
        np.save(path, np.stack(scores).reshape(len(tokens), len(tokens[0]), -1))
        return seconds


if __name__ == "__main__":
    line_loop.run(__doc__, Engine)
