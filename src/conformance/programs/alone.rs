//! One rank and its device: the checks of init, and the behaviour of a communicator of one.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use nccl_sys::{
    ncclComm_t, ncclConfig_t, ncclDataType_t as Kind, ncclRedOp_t as Op, ncclScalarResidence_t,
    ncclUniqueId,
};

use super::super::{ENDS, Facts, HANGS, Program, name_of};
use crate::nccl_call;
use crate::raw::operations::{Stream, all_reduce, group_end, group_start, recv, send};
use crate::raw::{Comm, IN_PROGRESS, Rank, Result, config, settle};

const fn program(
    name: &'static str,
    about: &'static str,
    body: fn(&Rank, &Facts) -> Result,
) -> Program {
    Program::ranks(1, name, about, body)
}

pub(super) const PROGRAMS: &[Program] = &[
    program(
        "config-fields",
        "which values of a config are refused",
        config_fields,
    ),
    program(
        "init-arguments",
        "which arguments of the init functions are refused",
        init_arguments,
    ),
    program("queries", "what a communicator says about itself", queries),
    program(
        "non-blocking-alone",
        "states of a non-blocking communicator of one rank",
        non_blocking,
    ),
    program(
        "environment-decides",
        "NCCL_COMM_BLOCKING against the config",
        environment_decides,
    )
    .with(&[("NCCL_COMM_BLOCKING", "0")]),
    program(
        "one-rank-runs-at-the-call",
        "a collective of one rank inside a group",
        at_the_call,
    ),
    program(
        "self-messages",
        "messages to oneself, with and without a partner",
        self_messages,
    ),
    program(
        "operation-arguments",
        "which arguments of operations are refused, and when",
        operation_arguments,
    ),
    program(
        "mixed-blocking",
        "both kinds of communicators in one group",
        mixed_blocking,
    ),
    program("memory", "ncclMemAlloc and ncclMemFree", memory),
    program("registration", "ncclCommRegister and its end", registration),
    program(
        "user-operators",
        "ncclRedOpCreatePreMulSum and its end",
        user_operators,
    ),
    program(
        "finalize-alone",
        "finalize, once more, and destroy",
        finalize,
    ),
    program(
        "revoke-alone",
        "what is possible after ncclCommRevoke",
        revoke,
    ),
];

fn config_fields(_: &Rank, facts: &Facts) -> Result {
    type Change = fn(&mut ncclConfig_t);
    let cases: [(&str, Change); 15] = [
        ("nothing", |_| {}),
        ("magic 0", |c| c.magic = 0),
        ("version of the future", |c| c.version = 99_999),
        ("an old version", |c| c.version = 21_400),
        ("blocking 2", |c| c.blocking = 2),
        ("cgaClusterSize -1", |c| c.cgaClusterSize = -1),
        ("minCTAs 0", |c| c.minCTAs = 0),
        ("minCTAs 2 alone", |c| c.minCTAs = 2),
        ("minCTAs 4, maxCTAs 2", |c| (c.minCTAs, c.maxCTAs) = (4, 2)),
        ("splitShare 2", |c| c.splitShare = 2),
        ("CTAPolicy 77", |c| c.CTAPolicy = 77),
        ("nvlsCTAs 0", |c| c.nvlsCTAs = 0),
        ("graphUsageMode 3", |c| c.graphUsageMode = 3),
        ("maxP2pPeers 0", |c| c.maxP2pPeers = 0),
        ("netName nosuchnetwork", |c| {
            c.netName = c"nosuchnetwork".as_ptr()
        }),
    ];
    for (name, change) in cases {
        let mut config = config(true);
        change(&mut config);
        let (comm, code) = Comm::alone(config);
        facts.code(name, code);
        if code != 0 {
            // Some refusals leave the thread inside a group; the next program must not be affected.
            facts.add(format!("{name}: group depth afterwards"), group_end() == 0);
        } else {
            nccl_call!(ncclCommDestroy(comm.0));
        }
    }
    Ok(())
}

fn init_arguments(_: &Rank, facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    facts.code("id", nccl_call!(ncclGetUniqueId(&mut id)));
    let mut comm: ncclComm_t = null_mut();
    let at: *mut ncclComm_t = &mut comm;
    for (name, out, ranks, rank) in [
        ("no place for the communicator", null_mut(), 1, 0),
        ("no ranks", at, 0, 0),
        ("rank -1", at, 1, -1),
        ("rank 1 of 1", at, 1, 1),
    ] {
        facts.code(name, nccl_call!(ncclCommInitRank(out, ranks, id, rank)));
        facts.add(format!("{name}: a communicator"), !comm.is_null());
        comm = null_mut();
    }
    for (name, ids) in [("no ids", 0), ("two ids for one rank", 2)] {
        let code = nccl_call!(ncclCommInitRankScalable(at, 1, 0, ids, &mut id, null_mut()));
        facts.code(name, code);
    }
    for (name, devices) in [("device 1000", 1), ("no devices", 0)] {
        let list: [c_int; 1] = [1000];
        facts.code(
            name,
            nccl_call!(ncclCommInitAll(at, devices, list.as_ptr())),
        );
    }
    Ok(())
}

fn queries(_: &Rank, facts: &Facts) -> Result {
    let (comm, code) = Comm::alone(config(true));
    facts.code("init", code);
    let mut number: c_int = -1;
    facts.code("count", nccl_call!(ncclCommCount(comm.0, &mut number)));
    facts.add("ranks", number);
    facts.code("rank", nccl_call!(ncclCommUserRank(comm.0, &mut number)));
    facts.add("number", number);
    facts.code("device", nccl_call!(ncclCommCuDevice(comm.0, &mut number)));
    facts.add("ordinal", number);
    facts.code(
        "count without a place for it",
        nccl_call!(ncclCommCount(comm.0, null_mut())),
    );
    facts.add("state", name_of(comm.state()));
    Ok(())
}

fn non_blocking(rank: &Rank, facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    facts.code("id", nccl_call!(ncclGetUniqueId(&mut id)));
    let mut comm = Comm::NULL;
    let mut config = config(false);
    let code = nccl_call!(ncclCommInitRankConfig(&mut comm.0, 1, id, 0, &mut config));
    // One rank alone may be complete before the call returns, or not.
    match code {
        0 | IN_PROGRESS => facts.add("init", "begun, or done"),
        _ => facts.code("init", code),
    }
    facts.add("a communicator at once", !comm.0.is_null());
    facts.code("init in the end", settle(comm, code, ENDS));
    let (x, stream) = (rank.memory(&[0; 64])?, Stream::of(&rank.stream));
    let code = all_reduce(comm, [x, x], 8, (Kind::ncclInt32, Op::ncclSum), stream);
    facts.code("all-reduce in the end", settle(comm, code, ENDS));
    facts.add("the stream ends", format!("{:?}", rank.ends_within(ENDS)));
    let code = nccl_call!(ncclCommFinalize(comm.0));
    facts.code("finalize in the end", settle(comm, code, ENDS));
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    Ok(())
}

fn environment_decides(_: &Rank, facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    facts.code("id", nccl_call!(ncclGetUniqueId(&mut id)));
    let mut comm = Comm::NULL;
    let mut config = config(true);
    let code = nccl_call!(ncclCommInitRankConfig(&mut comm.0, 1, id, 0, &mut config));
    facts.code("init of a communicator that asked to block", code);
    facts.code("in the end", settle(comm, code, ENDS));
    Ok(())
}

fn at_the_call(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    let (x, y) = (rank.memory(&[7; 64])?, rank.memory(&[0; 64])?);
    facts.code("start", group_start());
    let how = (Kind::ncclInt8, Op::ncclSum);
    facts.code(
        "all-reduce",
        all_reduce(comm, [x, y], 64, how, Stream::of(&rank.stream)),
    );
    facts.add("the stream ends", format!("{:?}", rank.ends_within(ENDS)));
    facts.add(
        "there before the end of the group",
        rank.read(y)? == [7; 64],
    );
    facts.code("end", group_end());
    facts.add(
        "the stream ends again",
        format!("{:?}", rank.ends_within(ENDS)),
    );
    facts.add("there after the end of the group", rank.read(y)? == [7; 64]);
    Ok(())
}

fn self_messages(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    let stream = Stream::of(&rank.stream);
    let (x, y) = (rank.memory(&[7; 64])?, rank.memory(&[0; 64])?);
    facts.code("a pair: start", group_start());
    facts.code("a pair: send", send(comm, x, 64, 0, stream));
    facts.code("a pair: receive", recv(comm, y, 64, 0, stream));
    facts.code("a pair: end", group_end());
    facts.add(
        "a pair: the stream ends",
        format!("{:?}", rank.ends_within(ENDS)),
    );
    facts.add("a pair: arrived", rank.read(y)? == [7; 64]);
    facts.code("nothing to nobody: start", group_start());
    facts.code("nothing: send", send(comm, x, 0, 0, stream));
    facts.code("nothing: receive", recv(comm, y, 0, 0, stream));
    facts.code("nothing: end", group_end());
    for (name, sends) in [("a send alone", true), ("a receive alone", false)] {
        facts.code(format!("{name}: start"), group_start());
        let code = match sends {
            true => send(comm, x, 64, 0, stream),
            false => recv(comm, y, 64, 0, stream),
        };
        facts.code(name, code);
        facts.code(format!("{name}: end"), group_end());
        facts.add(format!("{name}: state"), name_of(comm.state()));
    }
    facts.code("a send without a group", send(comm, x, 64, 0, stream));
    Ok(())
}

fn operation_arguments(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    let (stream, x) = (Stream::of(&rank.stream), rank.memory(&[0; 64])?);
    for (name, kind, op) in [
        ("type 99", Kind(99), Op::ncclSum),
        ("operator 99", Kind::ncclInt8, Op(99)),
        ("operator 5", Kind::ncclInt8, Op(5)),
    ] {
        facts.code(name, all_reduce(comm, [x, x], 8, (kind, op), stream));
        facts.code(format!("{name} in a group: start"), group_start());
        facts.code(
            format!("{name} in a group"),
            all_reduce(comm, [x, x], 8, (kind, op), stream),
        );
        facts.code(format!("{name} in a group: end"), group_end());
        facts.code(
            format!("after {name}"),
            all_reduce(comm, [x, x], 8, (Kind::ncclInt8, Op::ncclSum), stream),
        );
    }
    facts.code("peer 1 of 1", send(comm, x, 8, 1, stream));
    facts.code("peer -1", send(comm, x, 8, usize::MAX, stream));
    let at: *mut c_void = x.pointer();
    for root in [1, -1] {
        let code = nccl_call!(ncclBroadcast(
            at,
            at,
            8,
            Kind::ncclInt8,
            root,
            comm.0,
            stream.raw()
        ));
        facts.code(format!("root {root}"), code);
    }
    facts.code(
        "nothing",
        all_reduce(comm, [x, x], 0, (Kind::ncclInt8, Op::ncclSum), stream),
    );
    facts.code(
        "nothing of no type",
        all_reduce(comm, [x, x], 0, (Kind(99), Op::ncclSum), stream),
    );
    Ok(())
}

fn mixed_blocking(_: &Rank, facts: &Facts) -> Result {
    let mut ids = [ncclUniqueId::default(); 2];
    let mut comms = [Comm::NULL; 2];
    for id in &mut ids {
        nccl_call!(ncclGetUniqueId(id));
    }
    facts.code("start", group_start());
    for (index, (comm, id)) in comms.iter_mut().zip(ids).enumerate() {
        let mut config = config(index == 0);
        let code = nccl_call!(ncclCommInitRankConfig(&mut comm.0, 1, id, 0, &mut config));
        facts.code(format!("init with blocking = {}", config.blocking), code);
    }
    facts.code("end", group_end());
    Ok(())
}

fn memory(_: &Rank, facts: &Facts) -> Result {
    let mut pointer: *mut c_void = null_mut();
    facts.code("4 KiB", nccl_call!(ncclMemAlloc(&mut pointer, 4096)));
    facts.add("4 KiB: an address", !pointer.is_null());
    facts.code("free", nccl_call!(ncclMemFree(pointer)));
    facts.code("free nothing", nccl_call!(ncclMemFree(null_mut())));
    pointer = null_mut();
    facts.code("no bytes", nccl_call!(ncclMemAlloc(&mut pointer, 0)));
    facts.add("no bytes: an address", !pointer.is_null());
    Ok(())
}

fn registration(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    let x = rank.memory(&[0; 4096])?;
    let mut handles: [*mut c_void; 2] = [null_mut(); 2];
    for (index, handle) in handles.iter_mut().enumerate() {
        let code = nccl_call!(ncclCommRegister(comm.0, x.pointer(), 4096, handle));
        facts.code(format!("register {index}"), code);
        facts.add(format!("register {index}: a handle"), !handle.is_null());
    }
    for (index, handle) in handles.into_iter().enumerate() {
        facts.code(
            format!("deregister {index}"),
            nccl_call!(ncclCommDeregister(comm.0, handle)),
        );
    }
    facts.code(
        "deregister nothing",
        nccl_call!(ncclCommDeregister(comm.0, null_mut())),
    );
    let mut window = null_mut();
    for (name, size) in [("window", 4096), ("window of no bytes", 0)] {
        let code = nccl_call!(ncclCommWindowRegister(
            comm.0,
            x.pointer(),
            size,
            &mut window,
            1
        ));
        facts.code(name, code);
        facts.add(format!("{name}: a handle"), !window.is_null());
    }
    facts.code(
        "deregister no window",
        nccl_call!(ncclCommWindowDeregister(comm.0, null_mut())),
    );
    Ok(())
}

fn user_operators(_: &Rank, facts: &Facts) -> Result {
    let ((one, _), (two, _)) = (Comm::alone(config(true)), Comm::alone(config(true)));
    let (mut op, mut scalar) = (Op(0), 0.5f32);
    let host = ncclScalarResidence_t::ncclScalarHostImmediate;
    let at = std::ptr::from_mut(&mut scalar).cast();
    let code = nccl_call!(ncclRedOpCreatePreMulSum(
        &mut op,
        at,
        Kind::ncclFloat32,
        host,
        one.0
    ));
    facts.code("create", code);
    facts.add("not a builtin", op.0 >= 5);
    facts.code(
        "destroy on another communicator",
        nccl_call!(ncclRedOpDestroy(op, two.0)),
    );
    facts.code("destroy", nccl_call!(ncclRedOpDestroy(op, one.0)));
    facts.code("destroy again", nccl_call!(ncclRedOpDestroy(op, one.0)));
    facts.code(
        "destroy a builtin",
        nccl_call!(ncclRedOpDestroy(Op::ncclSum, one.0)),
    );
    Ok(())
}

fn finalize(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    facts.code("finalize", nccl_call!(ncclCommFinalize(comm.0)));
    facts.add("state", name_of(comm.state()));
    facts.code("finalize again", nccl_call!(ncclCommFinalize(comm.0)));
    let x = rank.memory(&[0; 64])?;
    let how = (Kind::ncclInt8, Op::ncclSum);
    facts.code(
        "an operation",
        all_reduce(comm, [x, x], 8, how, Stream::of(&rank.stream)),
    );
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    Ok(())
}

fn revoke(rank: &Rank, facts: &Facts) -> Result {
    let (comm, _) = Comm::alone(config(true));
    facts.code("revoke with flags", nccl_call!(ncclCommRevoke(comm.0, 77)));
    facts.code("revoke", nccl_call!(ncclCommRevoke(comm.0, 0)));
    facts.code("revoke again", nccl_call!(ncclCommRevoke(comm.0, 0)));
    let x = rank.memory(&[0; 64])?;
    let how = (Kind::ncclInt8, Op::ncclSum);
    facts.code(
        "an operation",
        all_reduce(comm, [x, x], 8, how, Stream::of(&rank.stream)),
    );
    facts.add("the stream ends", format!("{:?}", rank.ends_within(HANGS)));
    facts.code("finalize", nccl_call!(ncclCommFinalize(comm.0)));
    facts.code("destroy", nccl_call!(ncclCommDestroy(comm.0)));
    Ok(())
}
