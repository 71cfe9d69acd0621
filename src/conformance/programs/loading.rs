//! The properties of a loaded library, and how creating a communicator fails without a device.

use std::ffi::CString;
use std::ptr::null_mut;

use nccl::{Capability, Library};
use nccl_sys::{Api, ncclComm_t, ncclUniqueId};

use super::super::{Facts, Program, name_of};
use crate::nccl_call;
use crate::raw::{self, Result};

pub(super) const PROGRAMS: &[Program] = &[
    Program::library(
        "profiler-names",
        "which functions of nccl.h have a second name for profilers",
        profiler_names,
    ),
    Program::library(
        "safe-crate",
        "what the crate nccl makes of the library",
        safe_crate,
    ),
    Program::library(
        "missing-functions",
        "what nccl-sys says of functions that the library lacks",
        missing_functions,
    ),
    Program::library(
        "init-without-device",
        "the init functions when CUDA has no device, and the group depth after them",
        init_without_device,
    )
    .with(&[("CUDA_VISIBLE_DEVICES", "")]),
];

fn profiler_names(facts: &Facts) -> Result {
    let mut names = Vec::new();
    for name in Api::NAMES {
        let twin = CString::new(format!("p{name}"))?;
        if !raw::library().symbol(&twin).is_null() {
            names.push(*name);
        }
    }
    facts.add("there", names.join(" "));
    Ok(())
}

fn safe_crate(facts: &Facts) -> Result {
    let library = match std::env::var_os("NCCL_LIBRARY") {
        // SAFETY: the environment names the library that is compared.
        Some(path) => unsafe { Library::load_from(path) }?,
        None => Library::load()?,
    };
    facts.add("release", library.version());
    let lacking = Capability::ALL.iter().filter(|one| !library.has(**one));
    let lacking: Vec<_> = lacking.map(ToString::to_string).collect();
    facts.add("lacking", lacking.join(", "));
    let again = Library::load()?;
    facts.add("the same again", again.path() == library.path());
    // SAFETY: there is no such file.
    let another = unsafe { Library::load_from("/no/such/libnccl.so.2") };
    facts.add("another beside it is refused", another.is_err());
    Ok(())
}

fn missing_functions(facts: &Facts) -> Result {
    let api = raw::api();
    // For every release that added functions, one of them.
    facts.add("ncclMemAlloc", said(api.ncclMemAlloc()));
    facts.add("ncclGroupSimulateEnd", said(api.ncclGroupSimulateEnd()));
    facts.add(
        "ncclCommInitRankScalable",
        said(api.ncclCommInitRankScalable()),
    );
    facts.add("ncclResetDebugInit", said(api.ncclResetDebugInit()));
    facts.add("ncclCommShrink", said(api.ncclCommShrink()));
    facts.add("ncclAlltoAll", said(api.ncclAlltoAll()));
    facts.add("ncclCommRevoke", said(api.ncclCommRevoke()));
    facts.add("ncclCommGrow", said(api.ncclCommGrow()));
    facts.add("ncclCommSuspend", said(api.ncclCommSuspend()));
    facts.add("ncclParamBind", said(api.ncclParamBind()));
    facts.add("ncclAllReduceConfig", said(api.ncclAllReduceConfig()));
    facts.add("ncclSetEncryption", said(api.ncclSetEncryption()));
    Ok(())
}

fn said<F>(function: std::result::Result<F, nccl_sys::MissingFunction>) -> String {
    function.map_or_else(|missing| missing.to_string(), |_| "is there".into())
}

fn init_without_device(facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    let id_code = nccl_call!(ncclGetUniqueId(&mut id));
    facts.add("ncclGetUniqueId", name_of(id_code));
    let mut comm: ncclComm_t = null_mut();
    let at: *mut ncclComm_t = &mut comm;
    type Call<'a> = (&'a str, &'a dyn Fn() -> u32);
    let calls: [Call<'_>; 4] = [
        ("ncclCommInitRank", &|| {
            nccl_call!(ncclCommInitRank(at, 1, id, 0))
        }),
        ("ncclCommInitAll", &|| {
            nccl_call!(ncclCommInitAll(at, 1, std::ptr::null()))
        }),
        ("ncclCommInitRankConfig", &|| {
            nccl_call!(ncclCommInitRankConfig(at, 1, id, 0, null_mut()))
        }),
        ("ncclCommInitRankScalable", &|| {
            let mut id = id;
            nccl_call!(ncclCommInitRankScalable(at, 1, 0, 1, &mut id, null_mut()))
        }),
    ];
    for (name, call) in calls {
        // The texts are CUDA's, and depend on the driver.
        facts.add(name, name_of(call()));
        // SAFETY: `comm` is alive; NCCL has written to it, or has not.
        let made = !unsafe { at.read() }.is_null();
        facts.add(format!("{name}: a communicator is handed out"), made);
        facts.add(
            format!("{name}: end of a group that nobody began"),
            name_of(nccl_call!(ncclGroupEnd())),
        );
    }
    Ok(())
}
