//! All driver functions by name, except those that look others up by name ([`super::procedures`]).

use super::{
    capture, copy, ctx, device, event, graph, host, ipc, launch, memory, memory_pool, module,
    pointer, refused, rows, start, stream, stream_memory, virtual_memory,
};
use stand_in_object::Symbol;

/// Returns name and address of each function.
pub(super) fn symbols() -> Vec<Symbol> {
    let mut all = start::symbols();
    all.extend(with_faults());
    all.extend(refused::symbols());
    all.extend(refused::ignored());
    all
}

/// Returns the functions that need an initialized driver: faults can be injected into these.
fn with_faults() -> Vec<Symbol> {
    let mut all = device::symbols();
    all.extend(ctx::symbols());
    all.extend(stream::symbols());
    all.extend(capture::symbols());
    all.extend(graph::symbols());
    all.extend(event::symbols());
    all.extend(memory::symbols());
    all.extend(memory_pool::symbols());
    all.extend(virtual_memory::symbols());
    all.extend(pointer::symbols());
    all.extend(host::symbols());
    all.extend(ipc::symbols());
    all.extend(stream_memory::symbols());
    all.extend(copy::symbols());
    all.extend(rows::symbols());
    all.extend(module::symbols());
    all.extend(launch::symbols());
    all
}

/// Returns whether faults can be injected into this function: it must need an initialized driver.
pub fn has_faults_at(function: &str) -> bool {
    with_faults()
        .iter()
        .filter_map(|(name, _)| name.to_str().ok())
        .any(|name| without_version(name) == function)
}

/// Returns the name as C programs write it: `cuMemAlloc` for `cuMemAlloc_v2`.
fn without_version(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((plain, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => plain,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_symbol_is_listed_twice() {
        let mut names: Vec<_> = crate::driver::symbols()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn every_function_at_which_a_fault_can_sit_looks_for_it() {
        let files = [
            (include_str!("device.rs"), device::symbols()),
            (include_str!("ctx.rs"), ctx::symbols()),
            (include_str!("stream.rs"), stream::symbols()),
            (include_str!("capture.rs"), capture::symbols()),
            (include_str!("graph.rs"), graph::symbols()),
            (include_str!("event.rs"), event::symbols()),
            (include_str!("memory.rs"), memory::symbols()),
            (include_str!("memory_pool.rs"), memory_pool::symbols()),
            (include_str!("virtual_memory.rs"), virtual_memory::symbols()),
            (include_str!("pointer.rs"), pointer::symbols()),
            (include_str!("host.rs"), host::symbols()),
            (include_str!("ipc.rs"), ipc::symbols()),
            (include_str!("stream_memory.rs"), stream_memory::symbols()),
            (include_str!("copy.rs"), copy::symbols()),
            (include_str!("rows.rs"), rows::symbols()),
            (include_str!("module.rs"), module::symbols()),
            (include_str!("launch.rs"), launch::symbols()),
        ];
        for (text, symbols) in files {
            for (name, _) in symbols {
                let name = without_version(name.to_str().unwrap());
                assert!(has_faults_at(name), "{name}");
                let looks = ["enter", "make", "block"]
                    .iter()
                    .any(|function| text.contains(&format!("{function}(\"{name}\"")));
                assert!(looks, "{name}");
            }
        }
        assert!(!has_faults_at("cuLaunchCooperativeKernel"));
    }
}
