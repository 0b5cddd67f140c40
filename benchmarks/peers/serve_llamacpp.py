"""Runner: llama.cpp's HTTP server, inside this process. Its hello's note is the address; the end of stdin ends it."""

import importlib.metadata

import line_loop
import xllamacpp

NUM_SLOTS = 4
SLOT_TOKENS = 1024
ANY_PORT = 0


class Served:
    def __init__(self, options: line_loop.Options) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = options.model
        parameters.port = ANY_PORT
        parameters.n_parallel = NUM_SLOTS
        parameters.n_ctx = NUM_SLOTS * SLOT_TOKENS
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
        self._server = xllamacpp.Server(parameters)
        self._precision = options.kind

    def hello(self) -> line_loop.Hello:
        return line_loop.Hello(
            engine="llama.cpp server",
            version=f"xllamacpp {importlib.metadata.version('xllamacpp')} {xllamacpp.get_system_info()}",
            precision=self._precision,
            kv="float16",
            weight_bytes=0,
            note=self._server.listening_address,
        )


if __name__ == "__main__":
    line_loop.run(__doc__, Served)
