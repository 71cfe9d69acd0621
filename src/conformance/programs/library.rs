//! The behaviour of NCCL without a GPU.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use nccl_sys::{
    NCCL_COLLCONFIG_INITIALIZER, NCCL_ENCRYPTION_CONFIG_INITIALIZER, NCCL_SIM_INFO_INITIALIZER,
    ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclEncryptionMode_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};

use super::super::{Facts, Program};
use crate::nccl_call;
use crate::raw::{self, Result};

const fn program(name: &'static str, about: &'static str, body: fn(&Facts) -> Result) -> Program {
    Program::library(name, about, body)
}

pub(super) const PROGRAMS: &[Program] = &[
    program("version", "ncclGetVersion", version),
    program(
        "first-error",
        "the text of the last error before there is one",
        first_error,
    ),
    program(
        "error-strings",
        "ncclGetErrorString of every code, and of others",
        error_strings,
    ),
    program(
        "functions",
        "which functions of nccl.h are there",
        functions,
    ),
    program(
        "group-nesting",
        "starts and ends that match, and one end more",
        group_nesting,
    ),
    program(
        "group-threads",
        "a group belongs to its thread",
        group_threads,
    ),
    program(
        "group-poison",
        "which failures inside a group its end returns",
        group_poison,
    ),
    program(
        "simulate-end",
        "ncclGroupSimulateEnd where there is nothing to simulate",
        simulate_end,
    ),
    program(
        "null-communicator",
        "every function that takes a communicator, without one",
        null_communicator,
    ),
    program(
        "corrupt-communicator",
        "a communicator that is none",
        corrupt_communicator,
    ),
    program(
        "null-lifecycle",
        "the end of no communicator",
        null_lifecycle,
    ),
    program(
        "grow-arguments",
        "the order in which ncclCommGrow checks",
        grow_arguments,
    ),
    program(
        "collective-config",
        "ncclCollConfig_t is checked before the communicator",
        collective_config,
    ),
    program(
        "encryption-config",
        "what ncclSetEncryption accepts",
        encryption_config,
    ),
    program(
        "reduction-operators",
        "operators without a communicator",
        reduction_operators,
    ),
    program(
        "last-error-threads",
        "the text of the last error is the process's",
        last_error_threads,
    ),
    program("parameters", "parameters that are not there", parameters),
];

fn version(facts: &Facts) -> Result {
    let mut version = 0;
    facts.code("ncclGetVersion", nccl_call!(ncclGetVersion(&mut version)));
    facts.add("version", version);
    facts.code(
        "ncclGetVersion(null)",
        nccl_call!(ncclGetVersion(null_mut())),
    );
    Ok(())
}

fn first_error(facts: &Facts) -> Result {
    facts.add("ncclGetLastError", format!("{:?}", raw::last_error()));
    Ok(())
}

fn error_strings(facts: &Facts) -> Result {
    let Some(function) = raw::api().ncclGetErrorString else {
        return Err("ncclGetErrorString is missing".into());
    };
    for code in (0..=10).chain([u32::MAX, 4711]) {
        // SAFETY: the function takes any number and returns a text in static memory.
        let text = unsafe { raw::text(function(ncclResult_t(code))) };
        facts.add(format!("ncclGetErrorString({})", code as i32), text);
    }
    Ok(())
}

fn functions(facts: &Facts) -> Result {
    let missing: Vec<_> = raw::api().missing().collect();
    facts.add("missing", missing.join(" "));
    Ok(())
}

fn group_nesting(facts: &Facts) -> Result {
    facts.code("end outside", nccl_call!(ncclGroupEnd()));
    for step in ["start", "start", "end", "end", "end"] {
        let code = match step {
            "start" => nccl_call!(ncclGroupStart()),
            _ => nccl_call!(ncclGroupEnd()),
        };
        facts.code(step, code);
    }
    Ok(())
}

fn group_threads(facts: &Facts) -> Result {
    facts.code("start", nccl_call!(ncclGroupStart()));
    let other = std::thread::spawn(|| nccl_call!(ncclGroupEnd()));
    facts.code(
        "end on another thread",
        other.join().map_err(|_| "a thread panicked")?,
    );
    facts.code("end", nccl_call!(ncclGroupEnd()));
    Ok(())
}

/// An all-reduce on a handle that may be invalid.
fn all_reduce(comm: ncclComm_t) -> u32 {
    let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
    nccl_call!(ncclAllReduce(
        null(),
        null_mut(),
        1,
        kind,
        sum,
        comm,
        null_mut()
    ))
}

fn group_poison(facts: &Facts) -> Result {
    let mut count: c_int = 0;
    let mut wrong = ncclCollConfig_t {
        magic: 0,
        ..NCCL_COLLCONFIG_INITIALIZER
    };
    let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
    let config: *mut ncclCollConfig_t = &mut wrong;
    type Call<'a> = (&'a str, &'a mut dyn FnMut() -> u32);
    let calls: [Call<'_>; 4] = [
        ("all-reduce without a communicator", &mut || {
            all_reduce(null_mut())
        }),
        ("count without a communicator", &mut || {
            nccl_call!(ncclCommCount(null_mut(), &mut count))
        }),
        ("all-reduce with a wrong config", &mut || {
            nccl_call!(ncclAllReduceConfig(
                null(),
                null_mut(),
                1,
                kind,
                sum,
                null_mut(),
                null_mut(),
                config
            ))
        }),
        ("window without a communicator", &mut || {
            let mut window = null_mut();
            nccl_call!(ncclCommWindowRegister(
                null_mut(),
                null_mut(),
                0,
                &mut window,
                0
            ))
        }),
    ];
    for (name, call) in calls {
        facts.code(format!("{name}: start"), nccl_call!(ncclGroupStart()));
        facts.code(name, call());
        facts.code(format!("{name}: end"), nccl_call!(ncclGroupEnd()));
        facts.code(format!("{name}: another end"), nccl_call!(ncclGroupEnd()));
    }
    Ok(())
}

fn simulate_end(facts: &Facts) -> Result {
    let mut info = NCCL_SIM_INFO_INITIALIZER;
    facts.code("outside", nccl_call!(ncclGroupSimulateEnd(&mut info)));
    nccl_call!(ncclGroupStart());
    facts.code("empty", nccl_call!(ncclGroupSimulateEnd(&mut info)));
    facts.add("estimated time", info.estimatedTime);
    nccl_call!(ncclGroupStart());
    facts.code("null", nccl_call!(ncclGroupSimulateEnd(null_mut())));
    nccl_call!(ncclGroupStart());
    info.magic = 0;
    facts.code("wrong magic", nccl_call!(ncclGroupSimulateEnd(&mut info)));
    facts.code("end", nccl_call!(ncclGroupEnd()));
    facts.code("another end", nccl_call!(ncclGroupEnd()));
    Ok(())
}

fn null_communicator(facts: &Facts) -> Result {
    let comm = null_mut();
    let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
    let (x, y, stream) = (null(), null_mut(), null_mut());
    let mut number: c_int = 0;
    let mut state = ncclResult_t(0);
    let (mut pointer, mut window, mut long) = (null_mut(), null_mut(), 0);
    let mut op = ncclRedOp_t(0);
    let mut id = ncclUniqueId::default();
    facts.code(
        "ncclCommCount",
        nccl_call!(ncclCommCount(comm, &mut number)),
    );
    facts.code(
        "ncclCommCuDevice",
        nccl_call!(ncclCommCuDevice(comm, &mut number)),
    );
    facts.code(
        "ncclCommUserRank",
        nccl_call!(ncclCommUserRank(comm, &mut number)),
    );
    facts.code(
        "ncclCommGetAsyncError",
        nccl_call!(ncclCommGetAsyncError(comm, &mut state)),
    );
    facts.code("ncclAllReduce", all_reduce(comm));
    facts.code(
        "ncclBroadcast",
        nccl_call!(ncclBroadcast(x, y, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclBcast",
        nccl_call!(ncclBcast(y, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclReduce",
        nccl_call!(ncclReduce(x, y, 1, kind, sum, 0, comm, stream)),
    );
    facts.code(
        "ncclAllGather",
        nccl_call!(ncclAllGather(x, y, 1, kind, comm, stream)),
    );
    facts.code(
        "ncclReduceScatter",
        nccl_call!(ncclReduceScatter(x, y, 1, kind, sum, comm, stream)),
    );
    facts.code(
        "ncclAlltoAll",
        nccl_call!(ncclAlltoAll(x, y, 1, kind, comm, stream)),
    );
    facts.code(
        "ncclGather",
        nccl_call!(ncclGather(x, y, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclScatter",
        nccl_call!(ncclScatter(x, y, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclSend",
        nccl_call!(ncclSend(x, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclRecv",
        nccl_call!(ncclRecv(y, 1, kind, 0, comm, stream)),
    );
    facts.code(
        "ncclAllReduceConfig",
        nccl_call!(ncclAllReduceConfig(
            x,
            y,
            1,
            kind,
            sum,
            comm,
            stream,
            null()
        )),
    );
    facts.code(
        "ncclPutSignal",
        nccl_call!(ncclPutSignal(
            x, 1, kind, 0, window, 0, 0, 0, 0, comm, stream
        )),
    );
    facts.code(
        "ncclSignal",
        nccl_call!(ncclSignal(0, 0, 0, 0, comm, stream)),
    );
    facts.code(
        "ncclWaitSignal",
        nccl_call!(ncclWaitSignal(0, null_mut(), comm, stream)),
    );
    facts.code(
        "ncclCommRegister",
        nccl_call!(ncclCommRegister(comm, y, 1, &mut pointer)),
    );
    facts.code(
        "ncclCommDeregister",
        nccl_call!(ncclCommDeregister(comm, y)),
    );
    facts.code(
        "ncclCommWindowRegister",
        nccl_call!(ncclCommWindowRegister(comm, y, 1, &mut window, 0)),
    );
    facts.code(
        "ncclCommWindowDeregister",
        nccl_call!(ncclCommWindowDeregister(comm, null_mut())),
    );
    facts.code("ncclCommSuspend", nccl_call!(ncclCommSuspend(comm, 1)));
    facts.code("ncclCommResume", nccl_call!(ncclCommResume(comm)));
    let total = nccl_sys::ncclCommMemStat_t(3);
    facts.code(
        "ncclCommMemStats",
        nccl_call!(ncclCommMemStats(comm, total, &mut long)),
    );
    facts.code(
        "ncclWinGetUserPtr",
        nccl_call!(ncclWinGetUserPtr(comm, null_mut(), &mut pointer)),
    );
    facts.code(
        "ncclCommGetUniqueId",
        nccl_call!(ncclCommGetUniqueId(comm, &mut id)),
    );
    let device = nccl_sys::ncclScalarResidence_t::ncclScalarHostImmediate;
    let scalar = std::ptr::from_mut(&mut number).cast();
    facts.code(
        "ncclRedOpCreatePreMulSum",
        nccl_call!(ncclRedOpCreatePreMulSum(
            &mut op, scalar, kind, device, comm
        )),
    );
    Ok(())
}

fn corrupt_communicator(facts: &Facts) -> Result {
    // Larger than any release's communicator, and all zeros.
    let mut bytes = vec![0u64; 1 << 20];
    let comm: ncclComm_t = bytes.as_mut_ptr().cast();
    let mut count: c_int = 0;
    facts.code("ncclAllReduce", all_reduce(comm));
    facts.code("ncclCommCount", nccl_call!(ncclCommCount(comm, &mut count)));
    facts.code("start", nccl_call!(ncclGroupStart()));
    facts.code("ncclAllReduce in a group", all_reduce(comm));
    facts.code("end", nccl_call!(ncclGroupEnd()));
    Ok(())
}

fn null_lifecycle(facts: &Facts) -> Result {
    let comm = null_mut();
    facts.code("ncclCommDestroy", nccl_call!(ncclCommDestroy(comm)));
    facts.code("ncclCommAbort", nccl_call!(ncclCommAbort(comm)));
    facts.code("ncclCommFinalize", nccl_call!(ncclCommFinalize(comm)));
    facts.code("ncclCommRevoke", nccl_call!(ncclCommRevoke(comm, 0)));
    facts.code(
        "ncclCommRevoke with flags",
        nccl_call!(ncclCommRevoke(comm, 77)),
    );
    Ok(())
}

fn grow_arguments(facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    let (id, comm) = (std::ptr::from_mut(&mut id).cast_const(), null_mut());
    let mut new: ncclComm_t = null_mut();
    let at: *mut ncclComm_t = &mut new;
    for (name, ranks, id, rank, out) in [
        ("no place for the new communicator", 2, id, 1, null_mut()),
        ("no ranks", 0, id, 1, at),
        ("a negative rank", 2, id, -1, at),
        ("no unique id", 2, null(), 1, at),
        ("a rank too large", 2, id, 2, at),
    ] {
        facts.code(
            name,
            nccl_call!(ncclCommGrow(comm, ranks, id, rank, out, null_mut())),
        );
    }
    Ok(())
}

fn collective_config(facts: &Facts) -> Result {
    let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
    let call = |name: &str, change: fn(&mut ncclCollConfig_t)| {
        let mut config = NCCL_COLLCONFIG_INITIALIZER;
        change(&mut config);
        let code = nccl_call!(ncclAllReduceConfig(
            null(),
            null_mut(),
            1,
            kind,
            sum,
            null_mut(),
            null_mut(),
            &config
        ));
        facts.code(name, code);
    };
    call("nothing set", |_| {});
    call("wrong magic", |config| config.magic = 0);
    call("forceAlgSelection 2", |config| config.forceAlgSelection = 2);
    call("CTAPolicy 77", |config| config.CTAPolicy = 77);
    Ok(())
}

fn encryption_config(facts: &Facts) -> Result {
    let call =
        |name: &str, magic: u32, mode: ncclEncryptionMode_t, psk: Option<&std::ffi::CStr>| {
            let mut config = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
            config.magic = magic;
            config.mode = mode.0 as c_int;
            config.psk = psk.map_or(null_mut(), |text| text.as_ptr().cast_mut());
            facts.code(name, nccl_call!(ncclSetEncryption(&config)));
        };
    let good = NCCL_ENCRYPTION_CONFIG_INITIALIZER.magic;
    let (none, psk) = (
        ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_NONE,
        ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_PSK,
    );
    facts.code("null", nccl_call!(ncclSetEncryption(null())));
    call("none", good, none, None);
    call("wrong magic", 0, none, None);
    call("no key", good, psk, None);
    call("a short key", good, psk, Some(c"short"));
    call(
        "a key of 32 bytes",
        good,
        psk,
        Some(c"0123456789abcdef0123456789abcdef"),
    );
    call("mode 7", good, ncclEncryptionMode_t(7), None);
    Ok(())
}

fn reduction_operators(facts: &Facts) -> Result {
    for (name, op) in [("sum", 0), ("of nobody", 99), ("negative", u32::MAX)] {
        let code = nccl_call!(ncclRedOpDestroy(ncclRedOp_t(op), null_mut()));
        facts.code(format!("destroy an operator: {name}"), code);
    }
    Ok(())
}

fn last_error_threads(facts: &Facts) -> Result {
    facts.code("an error on another thread", {
        let other = std::thread::spawn(|| nccl_call!(ncclGroupEnd()));
        other.join().map_err(|_| "a thread panicked")?
    });
    facts.add("seen here", raw::last_error());
    nccl_call!(ncclGetVersion(null_mut()));
    facts.add("after an error without a text", raw::last_error());
    Ok(())
}

fn parameters(facts: &Facts) -> Result {
    let mut handle: nccl_sys::ncclParamHandle_t = null_mut();
    for key in [c"NCCL_DEBUG", c"NCCL_NO_SUCH_PARAMETER"] {
        let code = nccl_call!(ncclParamBind(&mut handle, key.as_ptr()));
        facts.code(format!("bind {}", key.to_string_lossy()), code);
    }
    let (mut table, mut length) = (null_mut(), 0);
    let code = nccl_call!(ncclParamGetAllParameterKeys(&mut table, &mut length));
    facts.code("keys", code);
    facts.add("number of keys", length);
    Ok(())
}
