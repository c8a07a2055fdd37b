"""What is known of other libraries' transforms: which generators they draw from, and what they take.

torchvision's draw from torch's global generator; `RandomChoice` and `RandomOrder` of its first version also from
Python's. albumentations' and MONAI's have generators of their own and a method that seeds them. Of what is from
elsewhere nothing is known: what it draws is found when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

_DRAWING = frozenset(
    (
        *("AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur"),
        *("GaussianNoise", "JPEG", "MixUp", "RandAugment", "ScaleJitter", "TrivialAugmentWide"),
    )
)  # and all whose name begins with Random
_STILL = frozenset(
    (
        *("CenterCrop", "ClampBoundingBoxes", "ClampKeyPoints", "Compose", "ConvertBoundingBoxFormat"),
        *("ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation", "Normalize"),
        *("Pad", "PILToTensor", "Resize", "RGB", "SanitizeBoundingBoxes", "SanitizeKeyPoints"),
        *("TenCrop", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
        "ImageClassification",
    )
)
# albumentations' that do the same to each image if they are always applied; they draw whether they are.
_STILL_OF_ALBUMENTATIONS = frozenset(
    (
        *("CenterCrop", "Compose", "Crop", "FromFloat", "LongestMaxSize", "Normalize", "Resize"),
        *("Pad", "PadIfNeeded", "SmallestMaxSize", "ToFloat", "ToRGB", "ToTensor3D", "ToTensorV2"),
    )
)
_DRAWING_FROM_PYTHON = ("RandomChoice", "RandomOrder")  # of transforms, not of transforms.v2
# A PIL image goes through these unchanged, or they refuse it.
_TENSOR_ONLY = frozenset(
    (
        *("ToDtype", "ConvertImageDtype", "Normalize", "GaussianNoise", "RandomErasing"),
        *("LinearTransformation", "ToPILImage", "to_dtype", "to_dtype_image", "convert_image_dtype"),
        *("normalize", "normalize_image", "gaussian_noise", "gaussian_noise_image", "erase"),
        *("erase_image", "to_pil_image"),
    )
)
_TO_TENSOR = frozenset(("ToTensor", "PILToTensor", "ToImage", "to_tensor", "pil_to_tensor", "to_image"))
_FROM_TENSOR = frozenset(("ToImage", "to_image"))  # from a PIL image, too, which is a detour
_FROM_ARRAY = frozenset(("ToTensor", "ToImage", "ToPILImage", "to_tensor", "to_image", "to_pil_image"))

#: Methods of albumentations and of MONAI that seed the generators of an object, and of all in it.
SEEDING_METHODS = ("set_random_seed", "set_random_state")

Library = Literal["torchvision", "albumentations"]
_LIBRARIES: tuple[Library, ...] = ("torchvision", "albumentations")


def find_library(call: Any) -> Library | None:
    """Whose transform something to call is: a transform, one derived from it, a function, a partial one.

    `torch.nn.Sequential` is of the library that its transforms are of.
    """
    if isinstance(call, functools.partial):
        return find_library(call.func)
    if _is_sequential(call):
        inside = set(map(find_library, call)) - {None}
        return inside.pop() if len(inside) == 1 else None
    named = (_top_level(call), *map(_top_level, type(call).__mro__))
    return next((library for library in _LIBRARIES if library in named), None)


def is_all_torchvision(call: Any) -> bool:
    """Whether something to call is torchvision's and has nothing of others in it, such as a user's function."""
    return find_library(call) == "torchvision" and all(
        (_top_level(type(part)) == "torchvision" and type(part).__name__ != "Lambda") or _is_sequential(part)
        for part in _iterate_parts(call)
    )


def find_seeding(call: Any) -> Callable[[int], Any] | None:
    """How an object that has generators of its own is seeded; None for one that cannot be."""
    return next((seed for name in SEEDING_METHODS if callable(seed := getattr(call, name, None))), None)


def find_randomness(call: Any) -> Literal["torch", "global", "own", False] | None:
    """What a transform draws from, as `Pipeline.map(random=...)` names it.

    Returns:
        False if it certainly draws nothing, None if that is not known.
    """
    parts = list(_iterate_parts(call))
    if find_seeding(call) is not None:
        if all(map(_is_still_albumentation, parts)):
            return False
        # The generator of MONAI's Compose is for nothing but the seeds of those in it.
        seedable = [part for part in parts if find_seeding(part) is not None]
        if any(type(part).__name__ != "Compose" or hasattr(part, "set_random_seed") for part in seedable):
            return "own"
    kinds = {_classify(part) for part in parts}
    for kind in ("global", "torch", None):
        if kind in kinds:
            return kind
    return False


def converts_arrays(call: Any) -> bool:
    """Whether a transform of torchvision's begins with one that takes an array `[H, W, C]`."""
    return _get_name(next(_iterate_single_parts(call), call)) in _FROM_ARRAY


def takes_tensors(call: Any) -> bool:
    """Whether a transform of torchvision's is given tensors: a part takes no PIL image, or the first makes one."""
    for number, part in enumerate(_iterate_single_parts(call)):
        name = _get_name(part)
        if name in _TENSOR_ONLY or (number == 0 and name in _FROM_TENSOR):
            return True
        if name in _TO_TENSOR:
            return False
    return False


def _iterate_single_parts(call: Any) -> Iterator[Any]:
    return (part for part in _iterate_parts(call) if type(part).__name__ not in ("Compose", "Sequential"))


def _iterate_parts(call: Any) -> Iterator[Any]:
    """A transform and all in it, in the order in which they are applied."""
    if isinstance(call, functools.partial):
        yield from _iterate_parts(call.func)
        return
    yield call
    inside: Any = getattr(call, "transforms", None)
    if isinstance(inside, list | tuple) or _is_sequential(inside):
        parts = list(inside)
    elif _is_sequential(call):
        parts = list(call.children())
    else:
        # What an adapter of ours adapts; torchvision's own have a method of this name.
        wrapped = getattr(call, "transform", None) if _top_level(type(call)) == "pipelines" else None
        parts = [wrapped] if callable(wrapped) else []
    for part in parts:
        yield from _iterate_parts(part)


def _classify(part: Any) -> Literal["torch", "global", False] | None:
    """Of one transform, without those in it."""
    if _top_level(type(part)) == "pipelines":  # an adapter of ours: what it adapts is another part
        return False if callable(getattr(part, "transform", None)) else None
    theirs = [cls for cls in type(part).__mro__ if _top_level(cls) == "torchvision"]
    names = [cls.__name__ for cls in theirs]
    is_first_version = all(cls.__module__.startswith("torchvision.transforms.transforms") for cls in theirs)
    if is_first_version and any(name in _DRAWING_FROM_PYTHON for name in names):
        return "global"
    if any(name.startswith("Random") or name in _DRAWING for name in names):
        return "torch"
    if _is_sequential(part) or (theirs and type(part) is theirs[0] and names[0] in _STILL):
        return False
    return None


def _is_still_albumentation(part: Any) -> bool:
    """Whether one transform of albumentations', without those in it, certainly does the same to each image."""
    return (
        _top_level(type(part)) == "albumentations"
        and type(part).__name__ in _STILL_OF_ALBUMENTATIONS
        and getattr(part, "p", 0) >= 1
        and not isinstance(getattr(part, "max_size", None), list | tuple)  # of which it draws one
        and "random" not in (getattr(part, "position", None), getattr(part, "pad_position", None))
    )


def _get_name(part: Any) -> str:
    return str(getattr(part, "__name__", None) or type(part).__name__)


def _is_sequential(value: Any) -> bool:
    cls: Callable[..., Any] = type(value)
    return _top_level(cls) == "torch" and cls.__name__ in ("Sequential", "ModuleList")


def _top_level(named: Any) -> str:
    return str(getattr(named, "__module__", "")).partition(".")[0]
