//! Groups: nesting, threads, poisoning, and the codes and texts that need no communicator.

mod ranks;

use std::ffi::CStr;
use std::ptr::{null, null_mut};
use std::thread;

use nccl_sys::{
    NCCL_COLLCONFIG_INITIALIZER, NCCL_ENCRYPTION_CONFIG_INITIALIZER, NCCL_SIM_INFO_INITIALIZER,
    ncclDataType_t as Kind, ncclRedOp_t as Op, ncclResult_t,
};
use ranks::{alone, api, last_error, nccl, threads};

fn reduce_on_nothing() -> u32 {
    let memory = null_mut();
    nccl!(ncclAllReduce(
        memory,
        memory,
        1,
        Kind::ncclInt8,
        Op::ncclSum,
        null_mut(),
        null_mut()
    ))
}

#[test]
fn an_end_outside_of_a_group_is_invalid_usage() {
    alone("an_end_outside_of_a_group_is_invalid_usage", &[], || {
        assert_eq!(nccl!(ncclGroupEnd()), 5);
        assert_eq!(last_error(), "ncclGroupEnd: not in a group call.");
        assert_eq!([nccl!(ncclGroupStart()), nccl!(ncclGroupStart())], [0, 0]);
        let ends = [
            nccl!(ncclGroupEnd()),
            nccl!(ncclGroupEnd()),
            nccl!(ncclGroupEnd()),
        ];
        assert_eq!(ends, [0, 0, 5]);
    });
}

#[test]
fn groups_belong_to_their_thread() {
    alone("groups_belong_to_their_thread", &[], || {
        assert_eq!(nccl!(ncclGroupStart()), 0);
        thread::spawn(|| assert_eq!(nccl!(ncclGroupEnd()), 5))
            .join()
            .unwrap();
        assert_eq!(nccl!(ncclGroupEnd()), 0);
    });
}

#[test]
fn an_error_of_an_operation_poisons_the_group() {
    alone("an_error_of_an_operation_poisons_the_group", &[], || {
        assert_eq!(reduce_on_nothing(), 4);
        assert_eq!(last_error(), "AllReduce : comm argument is NULL");
        assert_eq!([nccl!(ncclGroupStart()), nccl!(ncclGroupStart())], [0, 0]);
        assert_eq!(reduce_on_nothing(), 4);
        assert_eq!([nccl!(ncclGroupEnd()), nccl!(ncclGroupEnd())], [0, 4]);
        // The error does not affect the next group.
        assert_eq!([nccl!(ncclGroupStart()), nccl!(ncclGroupEnd())], [0, 0]);
    });
}

#[test]
fn errors_found_before_the_group_do_not_poison_it() {
    alone(
        "errors_found_before_the_group_do_not_poison_it",
        &[],
        || {
            let mut config = NCCL_COLLCONFIG_INITIALIZER;
            config.magic = 0;
            assert_eq!(nccl!(ncclGroupStart()), 0);
            let (memory, comm, stream) = (null_mut(), null_mut(), null_mut());
            let (kind, op) = (Kind::ncclInt8, Op::ncclSum);
            assert_eq!(
                nccl!(ncclAllReduceConfig(
                    memory, memory, 1, kind, op, comm, stream, &config
                )),
                4
            );
            assert_eq!(
                last_error(),
                "ncclCollConfig_t magic mismatch (got 0x0, expected 0xcafebeef)"
            );
            config = NCCL_COLLCONFIG_INITIALIZER;
            config.forceAlgSelection = 2;
            assert_eq!(
                nccl!(ncclAllReduceConfig(
                    memory, memory, 1, kind, op, comm, stream, &config
                )),
                4
            );
            let text = "config->forceAlgSelection=2 is invalid, accepted values are 0 or 1";
            assert_eq!(last_error(), text);
            assert_eq!(nccl!(ncclCommCount(null_mut(), &mut 0)), 4);
            assert_eq!(
                nccl!(ncclCommWindowRegister(
                    null_mut(),
                    null_mut(),
                    0,
                    null_mut(),
                    0
                )),
                4
            );
            assert_eq!(nccl!(ncclGroupEnd()), 0);
        },
    );
}

#[test]
fn a_poisoned_group_drops_everything_that_was_queued() {
    alone(
        "a_poisoned_group_drops_everything_that_was_queued",
        &[],
        || {
            threads(2, |rank| {
                let peer = 1 - rank.rank;
                let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
                assert_eq!(nccl!(ncclGroupStart()), 0);
                // Without its receive this send would hang.
                assert_eq!(rank.send(&from, Kind::ncclUint8, peer), 0);
                assert_eq!(rank.send(&from, Kind::ncclUint8, 2), 4);
                let text = "Send : invalid root 2 (root should be in the 0..2 range)";
                assert_eq!(last_error(), text);
                assert_eq!(nccl!(ncclGroupEnd()), 4);
                assert!(rank.is_idle());
                // The communicator is still usable.
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(rank.send(&from, Kind::ncclUint8, peer), 0);
                assert_eq!(rank.receive(&to, Kind::ncclUint8, peer), 0);
                assert_eq!(nccl!(ncclGroupEnd()), 0);
                rank.sync();
                assert_eq!(to.read(), [1]);
            });
        },
    );
}

#[test]
fn arguments_are_checked_in_nccls_words() {
    alone("arguments_are_checked_in_nccls_words", &[], || {
        threads(1, |rank| {
            let memory = rank.memory(&[0u8]);
            assert_eq!(rank.all_reduce(&memory, &memory, Kind(77), Op::ncclSum), 4);
            assert_eq!(last_error(), "AllReduce : invalid type 77");
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclInt8, Op(u32::MAX)),
                4
            );
            assert_eq!(last_error(), "AllReduce : invalid reduction operation -1");
            assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclInt8, Op(9)), 4);
            let text = "AllReduce : reduction operation 9 unknown to this communicator";
            assert_eq!(last_error(), text);
            assert_eq!(rank.receive(&memory, Kind::ncclInt8, -1), 4);
            assert_eq!(nccl!(ncclCommCount(rank.comm, null_mut())), 4);
            assert_eq!(last_error(), "CommCount : count argument is NULL");
        });
    });
}

#[test]
fn null_and_corrupt_communicators_are_told_apart() {
    alone("null_and_corrupt_communicators_are_told_apart", &[], || {
        let null = null_mut();
        for code in [
            nccl!(ncclCommDestroy(null)),
            nccl!(ncclCommAbort(null)),
            nccl!(ncclCommFinalize(null)),
            nccl!(ncclCommRevoke(null, 7)),
        ] {
            assert_eq!(code, 0);
        }
        let mut number = 0;
        let mut state = ncclResult_t(0);
        let check = |code: u32, text: &str| {
            assert_eq!(code, 4);
            assert_eq!(last_error(), format!("{text} : comm argument is NULL"));
        };
        check(nccl!(ncclCommCount(null, &mut number)), "CommCount");
        check(nccl!(ncclCommCuDevice(null, &mut number)), "CommCuDevice");
        check(nccl!(ncclCommUserRank(null, &mut number)), "CommUserRank");
        check(
            nccl!(ncclCommGetAsyncError(null, &mut state)),
            "ncclGetAsyncError",
        );
        let nothing = std::ptr::null_mut();
        let stream = null_mut();
        let byte = Kind::ncclInt8;
        check(
            nccl!(ncclBcast(nothing, 1, byte, 0, null, stream)),
            "Broadcast",
        );
        // At least as large as NCCL's own communicators.
        let mut fake = vec![0u64; 1 << 16];
        let fake = fake.as_mut_ptr().cast();
        assert_eq!(nccl!(ncclCommCount(fake, &mut number)), 4);
        assert_eq!(last_error(), "Error: corrupted comm object detected");
        assert!(nccl_emulator::violations().is_empty());
    });
}

#[test]
fn what_needs_no_gpu_answers_as_nccl_does() {
    alone("what_needs_no_gpu_answers_as_nccl_does", &[], || {
        assert_eq!(last_error(), "");
        let mut version = 0;
        assert_eq!(nccl!(ncclGetVersion(&mut version)), 0);
        assert_eq!(version, 23203);
        assert_eq!(nccl!(ncclGetVersion(null_mut())), 4);
        assert_eq!(last_error(), "");
        let text = |code: i32| {
            let function = api().ncclGetErrorString().unwrap();
            // SAFETY: returns a constant.
            unsafe { CStr::from_ptr(function(ncclResult_t(code as u32))) }
                .to_str()
                .unwrap()
        };
        assert_eq!(text(0), "no error");
        assert_eq!(
            text(5),
            "invalid usage (run with NCCL_DEBUG=WARN for details)"
        );
        assert_eq!(text(8), "timeout");
        assert_eq!([-1, 9, 10].map(text), ["unknown result code"; 3]);
        assert_eq!(nccl!(ncclGetUniqueId(null_mut())), 4);
        assert_eq!(last_error(), "GetUniqueId : out argument is NULL");

        let mut info = NCCL_SIM_INFO_INITIALIZER;
        assert_eq!(nccl!(ncclGroupSimulateEnd(&mut info)), 5);
        assert_eq!(
            [
                nccl!(ncclGroupStart()),
                nccl!(ncclGroupSimulateEnd(&mut info))
            ],
            [0, 0]
        );
        assert_eq!(info.estimatedTime, -1.0);
        assert_eq!(
            [
                nccl!(ncclGroupStart()),
                nccl!(ncclGroupSimulateEnd(null_mut()))
            ],
            [0, 0]
        );
        info.magic = 0;
        assert_eq!(
            [
                nccl!(ncclGroupStart()),
                nccl!(ncclGroupSimulateEnd(&mut info))
            ],
            [0, 4]
        );
        let text = "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER";
        assert_eq!(last_error(), text);
        assert_eq!(nccl!(ncclGroupEnd()), 5);

        for (op, text) in [
            (Op(0), "ncclRedOpDestroy : operator is a NCCL builtin."),
            (Op(u32::MAX), "ncclRedOpDestroy :  operator is garbage."),
            (Op(99), "ncclRedOpDestroy : invalid communicator passed."),
        ] {
            assert_eq!(nccl!(ncclRedOpDestroy(op, null_mut())), 4);
            assert_eq!(last_error(), text);
        }

        let mut config = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
        assert_eq!(
            [
                nccl!(ncclSetEncryption(null())),
                nccl!(ncclSetEncryption(&config))
            ],
            [0, 0]
        );
        config.mode = 1;
        assert_eq!(nccl!(ncclSetEncryption(&config)), 4);
        config.psk = c"short".as_ptr();
        assert_eq!(nccl!(ncclSetEncryption(&config)), 4);
        config.psk = c"0123456789abcdef0123456789abcdef".as_ptr();
        assert_eq!(nccl!(ncclSetEncryption(&config)), 0);
        config.mode = 7;
        assert_eq!(nccl!(ncclSetEncryption(&config)), 4);
        config.magic = 0;
        assert_eq!(nccl!(ncclSetEncryption(&config)), 4);

        let (mut table, mut length) = (null_mut(), 0);
        assert_eq!(
            nccl!(ncclParamGetAllParameterKeys(&mut table, &mut length)),
            0
        );
        // SAFETY: the table has as many C strings.
        let keys: Vec<_> = (0..length as usize)
            .map(|at| unsafe { CStr::from_ptr(*table.add(at)) })
            .collect();
        assert_eq!(keys.len(), 7);
        let mut handle = null_mut();
        assert_eq!(nccl!(ncclParamBind(&mut handle, keys[6].as_ptr())), 0);
        assert_eq!(nccl!(ncclParamGetI32(handle, &mut length)), 4);
        let unknown = c"NCCL_SOCKET_RETRY_CNT";
        assert_eq!(nccl!(ncclParamBind(&mut handle, unknown.as_ptr())), 4);
    });
}
