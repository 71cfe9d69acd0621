//! Versions: of NCCL, of the driver, and of the machine.

use super::view::FactsView;
use nccl_base::report::{Finding, Severity};

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    nccl(view, found);
    driver(view, found);
    machine(view, found);
}

fn nccl(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    const CHECK: &str = "nccl-version";
    let loaded = |rank: usize| view.facts(rank).library.as_ref();
    let groups = view.groups(|rank| Some(loaded(rank)?.version.clone()));
    if groups.len() > 1 {
        let path = |rank: usize| loaded(rank).map_or("?", |loaded| &loaded.path);
        let first = |version: &String| {
            let of = groups.iter().find(|(other, _)| other == version);
            of.map_or("?", |(_, ranks)| path(ranks[0]))
        };
        let (odd, text) = view.contrast(&groups, |version| {
            format!("loaded NCCL {version} from {}", first(version))
        });
        let finding = Finding::error(CHECK, text).fix(
            "put the same NCCL on every host, or name its file with NCCL_LIBRARY on every rank",
        );
        found.push(view.about(&odd, finding));
        return;
    }
    // On one host, two files of one release are two builds, or one that is about to be replaced.
    for (host, ranks) in view.groups(|rank| Some(view.host(rank).to_owned())) {
        let groups = view.groups(|rank| {
            ranks.binary_search(&rank).ok()?;
            Some(loaded(rank)?.path.clone())
        });
        if groups.len() > 1 {
            let (odd, text) = view.contrast(&groups, |path| format!("loaded {path}"));
            let finding = Finding::warning(CHECK, format!("on {host}, {text}"))
                .fix("name one of these files with NCCL_LIBRARY on every rank of the host");
            found.push(view.about(&odd, finding));
        }
    }
    if let [(version, ranks)] = &groups[..] {
        let path = loaded(ranks[0]).map_or("?", |loaded| &loaded.path);
        let text = format!("NCCL {version} is loaded ({path})");
        found.push(view.about(ranks, Finding::new(Severity::Ok, CHECK, text)));
    }
}

fn driver(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    const CHECK: &str = "cuda-driver";
    let groups = view.groups(|rank| Some(view.facts(rank).device.as_ref()?.driver.clone()));
    let text = |version: &String| format!("with a driver for CUDA {version}");
    match &groups[..] {
        [] => {}
        [(version, ranks)] => {
            let text = format!("the driver is for CUDA {version}");
            found.push(view.about(ranks, Finding::new(Severity::Ok, CHECK, text)));
        }
        _ => {
            let (odd, text) = view.contrast(&groups, text);
            let finding = Finding::warning(CHECK, text)
                .fix("install the same driver on every host: NCCL turns features on by it");
            found.push(view.about(&odd, finding));
        }
    }
}

fn machine(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    const CHECK: &str = "architecture";
    let groups = view.groups(|rank| {
        let process = view.process(rank)?;
        Some((process.architecture.clone(), process.little_endian))
    });
    if groups.len() < 2 {
        return;
    }
    let mixed = groups.iter().any(|(value, _)| value.1 != groups[0].0.1);
    let (odd, text) = view.contrast(&groups, |(architecture, little)| {
        let order = if *little { "little" } else { "big" };
        format!("on {architecture} ({order}-endian)")
    });
    let finding = match mixed {
        true => Finding::error(CHECK, text)
            .fix("start all ranks on machines of one byte order: NCCL sends numbers as they are in memory"),
        false => Finding::warning(CHECK, text)
            .fix("NCCL is not tested between machines of different architectures"),
    };
    found.push(view.about(&odd, finding));
}
