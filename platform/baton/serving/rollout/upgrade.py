"""Another version of baton for a deployment that runs: its code, not its configuration.

Theory of operation. New replicas run on the interpreter of whoever upgrades, so that two versions
can lie beside each other on every node, each in an environment of its own; the interpreter is part
of a deployment's build, and going back is ordering the old builds. Where the new version was put in
the place of the old one, new processes get it whatever is ordered: then what has not been replaced
yet is kept, and that is said. Old and new processes speak with each other meanwhile, so that only
versions of one fleet link protocol follow each other like this.
"""

from __future__ import annotations

from dataclasses import replace

from baton.control.autoscaling.rollout import stages
from baton.domain.errors import ApplyRefused
from baton.runtime.link.frames import PROTOCOL
from baton.serving.application.builds import Built, of_this_code
from baton.serving.rollout.ports import Applied, Running
from baton.serving.rollout.rollout import Course, Manner, Outcome, ordered, ordered_back, rolled
from baton.serving.shared.names import CONTROLLER, INGRESS


def upgrade(running: Running, manner: Manner) -> Applied:
    """Have every replica, the controller and the ingresses run the code of this process.

    Pools come first and ingresses last: coordinators that are known to be good bear with replicas
    that may not be. The configuration stays.

    Raises:
        ApplyRefused: it cannot, and nothing has changed; or it did not work out, and went back as
            far as that goes; or somebody else is changing what runs now.
    """
    began_s = manner.now_s()
    live, built = running.current(), running.built()
    pools = {name: pool.role for name, pool in live.config.pools.items()}
    ours, changed = of_this_code(built), not built.is_of_this_code()
    course = Course(
        old=built.builds(live.config),
        new=built.with_this_code(live.config),
        # KV blocks of two versions of vLLM are never exchanged.
        stages=(*stages(pools, together=built.vllm != ours.vllm), (CONTROLLER,), (INGRESS,)),
    )
    done = Applied(
        generation=live.generation,
        code=(built.text, ours.text) if changed else None,
        replaced=tuple(course.old) if changed else (),
        dry_run=manner.dry_run,
    )
    if changed:
        _refuse_other_protocol(built)
        if why := running.cannot_replace(live.config, tuple(pools)):
            raise ApplyRefused("; ".join(why), "nothing has changed; put that right, try again")
    if not changed or manner.dry_run:
        return done
    outcome = rolled(running, course, manner)
    if outcome.failed:
        back = _code_taken_back(running, course, outcome, manner)
        raise ApplyRefused(f"{outcome.failed}{back}", "look at 'baton status' and the logs")
    running.sign()
    return replace(done, why=outcome.why, took_s=manner.now_s() - began_s)


def _code_taken_back(running: Running, course: Course, outcome: Outcome, manner: Manner) -> str:
    """Have the old code run again; what to say of it."""
    if not manner.rollback:
        return "; left as it is"
    in_place = all(build.python == course.old[name].python for name, build in course.new.items())
    if not in_place:
        wrong = ordered_back(running, course, course.old, manner)
        return "; the old code runs again" + (f", but {'; '.join(wrong)}" if wrong else "")
    # Whatever starts now starts with the new code: there is no way back but to keep what still
    # runs, which is all of the old that no stage had replaced: those that were good say why.
    refused = ordered(running, course.builds(len(outcome.why)), manner)
    return (
        "; this code lies where the old code lay, so that what was replaced cannot go back:"
        " install the old version again and upgrade with it" + (f"; {refused}" if refused else "")
    )


def _refuse_other_protocol(built: Built) -> None:
    """Refuse to roll out what cannot speak with what runs.

    Raises:
        ApplyRefused: replicas and ingresses of the two would refuse each other.
    """
    if built.link != PROTOCOL:
        raise ApplyRefused(
            f"fleet link protocol {built.link} is spoken, and this baton speaks {PROTOCOL}: old and"
            " new processes would refuse each other",
            "nothing has changed; start a second deployment beside it and move clients there, or"
            " end this one and start it again",
        )
