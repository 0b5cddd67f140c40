"""The models that clients may ask for, and how each stands."""

from collections.abc import Mapping

from disagg.core.errors import InvalidRequest, ModelNotFound
from disagg.dispatch.stream import GenerationService, ModelStatus
from disagg.router.text import ModelText


class ServedModels:
    """Text sides by name, in the order in which they were named."""

    def __init__(self, service: GenerationService, texts: Mapping[str, ModelText]) -> None:
        self._service = service
        self._texts = texts

    def statuses(self) -> dict[str, ModelStatus]:
        """One the service does not know yet is not ready."""
        known = {status.model: status for status in self._service.models()}
        return {
            model: known.get(model, ModelStatus(model, False, "the service does not know this model", None))
            for model in self._texts
        }

    def text(self, model: str) -> ModelText:
        """Raises ModelNotFound."""
        if model not in self._texts:
            raise self.unknown(model)
        return self._texts[model]

    def only(self) -> str:
        """The one that is meant when none is named. Raises InvalidRequest when there are several."""
        if len(self._texts) != 1:
            raise InvalidRequest(
                "'model' is required: several are served here", param="model", code="missing_parameter"
            )
        return next(iter(self._texts))

    def unknown(self, model: str) -> ModelNotFound:
        served = ", ".join(self._texts) or "none"
        return ModelNotFound(f"the model {model!r} is not served here; served: {served}", param="model")
