"""Rolls out another version of baton with the same configuration.

Theory of operation. New replicas run on the interpreter of the command, so two versions can coexist
on every node, each in its own environment. The interpreter is part of a build, so a rollback orders
the old builds. After an installation in place, every new process runs the new version; a rollback
then only keeps the remaining old processes, and the error says so. Old and new processes talk to
each other meanwhile, so both versions need the same link protocol.
"""

from __future__ import annotations

from dataclasses import replace

from baton.control.autoscaling.rollout import replacement_stages
from baton.domain.errors import ApplyRejected
from baton.runtime.link.frames import PROTOCOL_VERSION
from baton.serving.application.builds import BuildRecord, with_current_code
from baton.serving.rollout.ports import ApplyResult, ApplyTarget
from baton.serving.rollout.rollout import (
    RolloutOptions,
    RolloutPlan,
    RolloutResult,
    order_builds,
    revert,
    run_rollout,
)
from baton.serving.shared.names import CONTROLLER, INGRESS


def upgrade(deployment: ApplyTarget, options: RolloutOptions) -> ApplyResult:
    """Have every replica, the controller and the ingresses run the code of this process.

    Pools come first and ingresses last, so that proven coordinators handle the new replicas.

    Raises:
        ApplyRejected: nothing has changed; or it failed and was rolled back as far as possible; or
            another command changes the deployment.
    """
    started_at_s = options.now_s()
    live, record = deployment.current(), deployment.build_record()
    pools = {name: pool.role for name, pool in live.config.pools.items()}
    new_record, is_other_code = with_current_code(record), not record.matches_current_code()
    plan = RolloutPlan(
        old=record.builds(live.config),
        new=record.builds_for_current_code(live.config),
        # Two versions of vLLM never exchange KV blocks.
        stages=(
            *replacement_stages(pools, together=record.vllm != new_record.vllm),
            (CONTROLLER,),
            (INGRESS,),
        ),
    )
    result = ApplyResult(
        generation=live.generation,
        code_versions=(record.description, new_record.description) if is_other_code else None,
        replaced=tuple(plan.old) if is_other_code else (),
        dry_run=options.dry_run,
    )
    if is_other_code:
        _check_link_protocol(record)
        if blockers := deployment.replace_blockers(live.config, tuple(pools)):
            raise ApplyRejected(
                "; ".join(blockers), "nothing has changed; put that right, try again"
            )
    if not is_other_code or options.dry_run:
        return result
    outcome = run_rollout(deployment, plan, options)
    if outcome.failure:
        revert_text = _revert_code(deployment, plan, outcome, options)
        raise ApplyRejected(
            f"{outcome.failure}{revert_text}", "look at 'baton status' and the logs"
        )
    deployment.record_code_version()
    return replace(
        result, stage_decisions=outcome.stage_decisions, took_s=options.now_s() - started_at_s
    )


def _revert_code(
    deployment: ApplyTarget, plan: RolloutPlan, outcome: RolloutResult, options: RolloutOptions
) -> str:
    if not options.rollback:
        return "; left as it is"
    is_in_place = all(build.python == plan.old[name].python for name, build in plan.new.items())
    if not is_in_place:
        problems = revert(deployment, plan, plan.old, options)
        return "; the old code runs again" + (f", but {'; '.join(problems)}" if problems else "")
    # New processes run the new code in any case. So keep the old processes that no good stage has
    # replaced.
    failure = order_builds(deployment, plan.builds_at(len(outcome.stage_decisions)), options)
    return (
        "; this code lies where the old code lay, so that what was replaced cannot go back:"
        " install the old version again and upgrade with it" + (f"; {failure}" if failure else "")
    )


def _check_link_protocol(record: BuildRecord) -> None:
    """Reject a version with another link protocol.

    Raises:
        ApplyRejected: replicas and ingresses of the two versions would reject each other.
    """
    if record.link_protocol != PROTOCOL_VERSION:
        raise ApplyRejected(
            f"fleet link protocol: got {record.link_protocol}, expected {PROTOCOL_VERSION}: old and"
            " new processes would reject each other",
            "nothing has changed; start a second deployment beside it and move clients there, or"
            " end this deployment and start it again",
        )
