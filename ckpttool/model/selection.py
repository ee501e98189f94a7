"""The logical tensors of a checkpoint of any format: weights and optimizer states, each by one name."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import PlanError
from ckpttool.messages import similar
from ckpttool.model import MASTER, MODULE
from ckpttool.model.items import WEIGHTS as WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.model import Checkpoint, State


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One tensor of a checkpoint."""

    name: str
    """Parameter or buffer."""
    key: str
    """WEIGHTS, or the optimizer's name for the state: "exp_avg"."""
    state: State
    """The place of its bytes."""


def contents(checkpoint: Checkpoint) -> list[Content]:
    """Every logical tensor, in the order of the module, without replicas and tied names."""
    result = []
    for parameter in checkpoint.parameters:
        result.append(Content(parameter.name, WEIGHTS, checkpoint.weights(parameter)))
        result += [Content(parameter.name, k, s) for k, s in parameter.optimizer_states.items()]
    result += [Content(b.name, WEIGHTS, b.state) for b in checkpoint.buffers]
    return result


def find(checkpoint: Checkpoint, name: str, key: str) -> State:
    """Find one tensor by its own or a tied name.

    Args:
        checkpoint: The checkpoint.
        name: Parameter or buffer.
        key: WEIGHTS, or the name of a state: "fp32", "module", "exp_avg".

    Raises:
        PlanError: The checkpoint has no such tensor.
    """
    stored = checkpoint.aliases.get(name, name)
    held = {k: s for owner, k, s in checkpoint.states() if owner == stored}
    if not held:
        raise no_such_parameter(checkpoint, name)
    order = (MODULE, MASTER, "buffer") if checkpoint.has_newer_copies else (MASTER, MODULE, "buffer")
    state = next((held[k] for k in (order if key == WEIGHTS else (key,)) if k in held), None)
    if state is None:
        raise PlanError(checkpoint.location, f"holds no {key} of {name}", f"choose one of {', '.join(held)}")
    return state


def no_such_parameter(checkpoint: Checkpoint, name: str) -> PlanError:
    """Return the error that a checkpoint has no parameter or buffer of a name, with the most similar one."""
    known = dict.fromkeys(owner for owner, _, _ in checkpoint.states())
    hint = f"{similar(name, [*known, *checkpoint.aliases])}inspect --params lists the names"
    return PlanError(checkpoint.location, f"holds no parameter {name}", hint)


GLOBS = "globs match whole names, as '*.q_proj.*' does"
"""What a user may have missed who selects nothing."""
NO_SUCH_NAME = ("holds no tensor of that name", f"check include and exclude: {GLOBS}", ("include", "exclude"))
"""Problem, next step and parameters where globs match no tensor."""


def matcher(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that matches full names against the globs; no ``include`` means all names."""
    # A string is a sequence of letters, but means one glob.
    include, exclude = ([globs] if isinstance(globs, str) else globs for globs in (include, exclude))

    def matches(name: str) -> bool:
        wanted = not include or any(fnmatch.fnmatchcase(name, glob) for glob in include)
        return wanted and not any(fnmatch.fnmatchcase(name, glob) for glob in exclude)

    return matches
