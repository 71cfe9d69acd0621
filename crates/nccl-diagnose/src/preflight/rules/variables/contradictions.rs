//! Variables that contradict how this crate calls NCCL, or which machines there are.

use super::super::view::FactsView;
use super::origin::with_origin;
use nccl_base::launch_mode::{LaunchMode, LaunchPreference};
use nccl_base::report::Finding;
use nccl_base::system::variables::number;

/// Variables that contradict the launch mode of this crate's calls to NCCL.
pub(super) fn contradictions(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let with = |name: &'static str, is_bad: &dyn Fn(i64) -> bool| {
        view.groups(|rank| {
            if mode_of(view, rank) != Some(LaunchMode::NonBlocking) {
                return None;
            }
            let variable = view.process(rank)?.variable(name)?;
            number(&variable.value).filter(|&value| is_bad(value))?;
            Some(with_origin(variable))
        })
    };
    for (text, ranks) in with("NCCL_COMM_BLOCKING", &|value| value == 1) {
        let who = view.who(&ranks);
        let what = format!(
            "{who}: {text} makes every call of NCCL block without a deadline, whatever a program asks for"
        );
        let finding = Finding::error("launch-mode", what)
            .fix("unset NCCL_COMM_BLOCKING, in that file or variable");
        found.push(view.about(&ranks, finding));
    }
    for (text, ranks) in with("NCCL_COMM_SPLIT_SHARE_RESOURCES", &|value| value != 0) {
        let who = view.who(&ranks);
        let what = format!(
            "{who}: {text} makes a communicator and those that NCCL splits from it be aborted together; this \
             crate makes its own splits apart from each other, those of other code are not"
        );
        let finding =
            Finding::warning("launch-mode", what).fix("unset NCCL_COMM_SPLIT_SHARE_RESOURCES");
        found.push(view.about(&ranks, finding));
    }
    for name in ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"] {
        let contradicting = view.groups(|rank| {
            let mode = mode_of(view, rank).filter(|&mode| mode != LaunchMode::NonBlocking)?;
            let variable = view.process(rank)?.variable(name)?;
            let does = mode.contradiction_of(name, &variable.value)?;
            Some(format!("{} {does}", with_origin(variable)))
        });
        for (text, ranks) in contradicting {
            let finding = Finding::error("launch-mode", format!("{}: {text}", view.who(&ranks)))
                .fix(format!("unset {name}, in that file or variable"));
            found.push(view.about(&ranks, finding));
        }
    }
}

/// The mode to check this rank against. A variable that contradicts only `BlockingChild` is no finding for a rank that
/// requested no mode: the rank then uses the other one.
fn mode_of(view: &FactsView<'_>, rank: usize) -> Option<LaunchMode> {
    let code = u8::try_from(view.facts(rank).launch_mode).ok()?;
    Some(match LaunchPreference::of_code(code)? {
        LaunchPreference::Asked(mode) => mode,
        LaunchPreference::Either | LaunchPreference::OnlyNonBlocking => LaunchMode::NonBlocking,
    })
}

/// Two machines with the same `NCCL_HOSTID`: NCCL would look for memory that they do not share.
pub(super) fn host_ids(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    for (id, ranks) in
        view.groups(|rank| view.process(rank)?.value("NCCL_HOSTID").map(str::to_owned))
    {
        let boots = view.groups(|rank| {
            ranks.binary_search(&rank).ok()?;
            Some(view.process(rank)?.boot.clone())
        });
        if boots.len() > 1 {
            let what = format!(
                "{} have NCCL_HOSTID={id}, which tells NCCL that they share a machine, and they run on {} of \
                 them",
                view.who(&ranks),
                boots.len()
            );
            let finding = Finding::error("host-id", what)
                .fix("give every machine an NCCL_HOSTID of its own, or unset it");
            found.push(view.about(&ranks, finding));
        }
    }
}
