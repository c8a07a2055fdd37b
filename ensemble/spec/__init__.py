"""What a user declares: an `Ensemble` of `Member`s or a `Search`, a `Recipe` that trains them, their `Resources`.

Everything here is a frozen dataclass that checks itself when it is made. A mistake is a `SpecError` of one
line that says what was given, where, and what would be valid. Nothing here imports torch, Ray or Optuna.
"""

from ensemble.spec.ensemble import CACHES as CACHES
from ensemble.spec.ensemble import COMBINERS as COMBINERS
from ensemble.spec.ensemble import DEVICES as DEVICES
from ensemble.spec.ensemble import SHARING as SHARING
from ensemble.spec.ensemble import STALL_POLICIES as STALL_POLICIES
from ensemble.spec.ensemble import Ensemble, Member, Recipe, Resources
from ensemble.spec.identity import PRECISIONS as PRECISIONS
from ensemble.spec.identity import Identity
from ensemble.spec.identity import Precision as Precision
from ensemble.spec.member_pipelines import MemberPipelines as MemberPipelines
from ensemble.spec.objectives import ALWAYS_REPORTED as ALWAYS_REPORTED
from ensemble.spec.objectives import Implied as Implied
from ensemble.spec.objectives import Mode as Mode
from ensemble.spec.objectives import check_ranking as check_ranking
from ensemble.spec.objectives import not_reported as not_reported
from ensemble.spec.objectives import settle as settle
from ensemble.spec.options import Word as Word
from ensemble.spec.sample_weights import Bootstrap, Folds
from ensemble.spec.sample_weights import Weighting as Weighting
from ensemble.spec.sample_weights import check_weighting as check_weighting
from ensemble.spec.sample_weights import recorded as recorded
from ensemble.spec.search_space import Dimension, Search, choice, integer, loguniform, uniform
from ensemble.spec.training_options import WORDS as WORDS
from ensemble.spec.training_options import check_space as check_space
from ensemble.spec.training_options import check_words as check_words
from ensemble.spec.training_options import resolved as resolved
from ensemble.spec.validation import SpecError, unknown_name
from ensemble.spec.validation import check_choice as check_choice
from ensemble.spec.validation import check_number as check_number
from ensemble.spec.validation import json_value as json_value
from ensemble.spec.validation import strict as strict

__all__ = [
    "Bootstrap",
    "Dimension",
    "Ensemble",
    "Folds",
    "Identity",
    "Member",
    "Recipe",
    "Resources",
    "Search",
    "SpecError",
    "choice",
    "integer",
    "loguniform",
    "uniform",
    "unknown_name",
]
