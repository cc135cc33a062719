"""Which class of transformers a checkpoint's model is: text alone, or text behind a vision or audio tower.

Decides from the configuration alone, so that the build, its estimate and the server come to the same class.
"""

from __future__ import annotations

from typing import Any

# A class that a checkpoint names is looked for in all of them; one that it does not name is the first's that has one.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def auto_class(config: Any) -> Any:
    """The auto class of transformers whose `from_config` and `from_pretrained` make a configuration's model.

    A configuration with a tower may stand for two: Qwen3.5-MoE's is a text model's to AutoModelForCausalLM, and the
    whole model's to AutoModelForImageTextToText. The one that the checkpoint names (`architectures`) is meant.

    Raises:
        ValueError: when no class of transformers continues a text with it.
    """
    import transformers

    named = set(getattr(config, "architectures", None) or ())
    found = []
    for name in _AUTO:
        auto = getattr(transformers, name, None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        classes = auto._model_mapping[type(config)]
        if named & {c.__name__ for c in (classes if isinstance(classes, tuple | list) else (classes,))}:
            return auto
        found.append(auto)
    if not found:
        raise ValueError(f"{config.model_type}: transformers has no class that continues a text")
    return found[0]


def model_of(config: Any, **options: Any) -> Any:
    """A configuration's model as the experts of a bundle are named in it, by `from_config` with these options.

    Raises:
        ValueError: when no class of transformers generates text from it.
        InputError: for a layout that is not supported.
    """
    from .layouts import adapt

    model = auto_class(config).from_config(config, **options)
    adapt(model)
    return model
