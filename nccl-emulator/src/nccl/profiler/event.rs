//! Events as passed to a plugin: their kinds, their descriptors in C, and their states.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null;

use crate::nccl::task::Function;
use crate::numbers::datatype::DataType;

/// Bits of the activation mask, which are also the kinds of events.
pub(super) mod bits {
    pub(crate) const GROUP: i32 = 1 << 0;
    pub(crate) const COLL: i32 = 1 << 1;
    pub(crate) const P2P: i32 = 1 << 2;
    pub(crate) const PROXY_OP: i32 = 1 << 3;
    pub(crate) const PROXY_STEP: i32 = 1 << 4;
    pub(crate) const KERNEL_CH: i32 = 1 << 6;
    pub(crate) const NET_PLUGIN: i32 = 1 << 7;
    pub(crate) const GROUP_API: i32 = 1 << 8;
    pub(crate) const COLL_API: i32 = 1 << 9;
    pub(crate) const P2P_API: i32 = 1 << 10;
    pub(crate) const KERNEL_LAUNCH: i32 = 1 << 11;
    /// Events of collectives on copy engines, which the emulator does not have.
    pub(crate) const COPY_ENGINE: i32 = 1 << 12 | 1 << 13 | 1 << 14;
    /// Events that need the event of their task as an ancestor.
    pub(crate) const BELOW_TASK: i32 = PROXY_OP | PROXY_STEP | KERNEL_CH | NET_PLUGIN;
}

/// States that NCCL records for events (`ncclProfilerEventState_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    SendGpuWait = 8,
    SendWait = 9,
    RecvWait = 10,
    RecvFlushWait = 11,
    RecvGpuWait = 12,
    ProxyOpInProgress = 19,
    SendPeerWait = 20,
    KernelChStop = 22,
    GroupStartApiStop = 23,
    GroupEndApiStart = 24,
}

/// A plugin's handle of an event. Null stands for no event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub(super) *mut c_void);

// SAFETY: an opaque value that NCCL hands back to the plugin from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub(super) const NONE: Self = Self(std::ptr::null_mut());

    pub(super) fn is_some(self) -> bool {
        self != Self::NONE
    }
}

/// An event.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub(super) parent: Handle,
    /// The rank of events that belong to tasks and proxies; 0 for all others, as in NCCL.
    pub(super) rank: i32,
    pub(super) kind: Kind,
}

/// The data of an event, by its kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Group,
    GroupApi {
        captured: bool,
        depth: i32,
    },
    CollApi {
        function: Function,
        count: usize,
        data_type: DataType,
        root: i32,
        stream: usize,
        captured: bool,
        tag: u64,
    },
    P2pApi {
        function: Function,
        count: usize,
        data_type: DataType,
        stream: usize,
        captured: bool,
    },
    KernelLaunch {
        stream: usize,
    },
    Coll {
        sequence: u64,
        function: Function,
        send: u64,
        receive: u64,
        count: u64,
        root: i32,
        data_type: DataType,
        group: Handle,
        tag: u64,
    },
    P2p {
        function: Function,
        address: u64,
        data_type: DataType,
        count: u64,
        peer: i32,
        group: Handle,
    },
    ProxyOp {
        peer: i32,
        steps: i32,
        chunk: i32,
        is_send: bool,
    },
    ProxyStep {
        step: i32,
    },
    KernelCh {
        time: u64,
    },
}

/// `ncclProfilerEventDescr_v7_t`. The descriptors of versions 4 to 6 are prefixes of it, also in each member of the union; the
/// type of version 4 is the first byte of `kind`.
#[repr(C)]
pub(super) struct Descriptor {
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    of_kind: OfKind,
}

#[repr(C)]
union OfKind {
    none: (),
    group_api: GroupApi,
    coll_api: CollApi,
    p2p_api: P2pApi,
    kernel_launch: *mut c_void,
    coll: Coll,
    p2p: P2p,
    proxy_op: ProxyOp,
    proxy_step: c_int,
    kernel_ch: KernelCh,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupApi {
    captured: bool,
    depth: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CollApi {
    function: *const c_char,
    count: usize,
    data_type: *const c_char,
    root: c_int,
    stream: *mut c_void,
    captured: bool,
    tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct P2pApi {
    function: *const c_char,
    count: usize,
    data_type: *const c_char,
    stream: *mut c_void,
    captured: bool,
    tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Coll {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    root: c_int,
    data_type: *const c_char,
    channels: u8,
    warps: u8,
    algorithm: *const c_char,
    protocol: *const c_char,
    group: *mut c_void,
    kernel_variant: *const c_char,
    is_symmetric: bool,
    tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct P2p {
    function: *const c_char,
    buffer: *mut c_void,
    data_type: *const c_char,
    count: usize,
    peer: c_int,
    channels: u8,
    group: *mut c_void,
    tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ProxyOp {
    pid: libc::pid_t,
    channel: u8,
    peer: c_int,
    steps: c_int,
    chunk: c_int,
    is_send: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct KernelCh {
    channel: u8,
    time: u64,
}

/// The only channel of every operation.
const CHANNEL: u8 = 0;

impl Event {
    /// Returns the bit of the event's kind.
    pub(super) fn bit(&self) -> i32 {
        match self.kind {
            Kind::Group => bits::GROUP,
            Kind::GroupApi { .. } => bits::GROUP_API,
            Kind::CollApi { .. } => bits::COLL_API,
            Kind::P2pApi { .. } => bits::P2P_API,
            Kind::KernelLaunch { .. } => bits::KERNEL_LAUNCH,
            Kind::Coll { .. } => bits::COLL,
            Kind::P2p { .. } => bits::P2P,
            Kind::ProxyOp { .. } => bits::PROXY_OP,
            Kind::ProxyStep { .. } => bits::PROXY_STEP,
            Kind::KernelCh { .. } => bits::KERNEL_CH,
        }
    }

    /// Returns the descriptor for a plugin of this version.
    pub(super) fn descriptor(&self, version: u32) -> Descriptor {
        // Before version 5 a task's parent is the event of its group.
        let parent = match self.kind {
            Kind::Coll { group, .. } | Kind::P2p { group, .. } if version < 5 => group,
            _ => self.parent,
        };
        Descriptor {
            kind: u64::from(self.bit().unsigned_abs()),
            parent: parent.0,
            rank: self.rank,
            of_kind: self.kind.to_c(),
        }
    }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}

impl Kind {
    fn to_c(self) -> OfKind {
        match self {
            Self::Group => OfKind { none: () },
            Self::GroupApi { captured, depth } => OfKind {
                group_api: GroupApi { captured, depth },
            },
            Self::CollApi {
                function,
                count,
                data_type,
                root,
                stream,
                captured,
                tag,
            } => OfKind {
                coll_api: CollApi {
                    function: function_name(function).as_ptr(),
                    count,
                    data_type: type_name(data_type).as_ptr(),
                    root,
                    stream: pointer(stream as u64),
                    captured,
                    tag,
                },
            },
            Self::P2pApi {
                function,
                count,
                data_type,
                stream,
                captured,
            } => OfKind {
                p2p_api: P2pApi {
                    function: function_name(function).as_ptr(),
                    count,
                    data_type: type_name(data_type).as_ptr(),
                    stream: pointer(stream as u64),
                    captured,
                    tag: 0,
                },
            },
            Self::KernelLaunch { stream } => OfKind {
                kernel_launch: pointer(stream as u64),
            },
            Self::Coll { .. } => self.coll(),
            Self::P2p {
                function,
                address,
                data_type,
                count,
                peer,
                group,
            } => OfKind {
                p2p: P2p {
                    function: function_name(function).as_ptr(),
                    buffer: pointer(address),
                    data_type: type_name(data_type).as_ptr(),
                    count: count as usize,
                    peer,
                    channels: 1,
                    group: group.0,
                    tag: 0,
                },
            },
            Self::ProxyOp {
                peer,
                steps,
                chunk,
                is_send,
            } => OfKind {
                proxy_op: ProxyOp {
                    pid: std::process::id() as libc::pid_t,
                    channel: CHANNEL,
                    peer,
                    steps,
                    chunk,
                    is_send: c_int::from(is_send),
                },
            },
            Self::ProxyStep { step } => OfKind { proxy_step: step },
            Self::KernelCh { time } => OfKind {
                kernel_ch: KernelCh {
                    channel: CHANNEL,
                    time,
                },
            },
        }
    }

    fn coll(self) -> OfKind {
        let Self::Coll {
            sequence,
            function,
            send,
            receive,
            count,
            root,
            data_type,
            group,
            tag,
        } = self
        else {
            unreachable!("called for collectives");
        };
        OfKind {
            coll: Coll {
                sequence,
                function: function_name(function).as_ptr(),
                send: pointer(send),
                receive: pointer(receive),
                count: count as usize,
                root,
                data_type: type_name(data_type).as_ptr(),
                channels: 1,
                warps: 1,
                algorithm: c"RING".as_ptr(),
                protocol: c"SIMPLE".as_ptr(),
                group: group.0,
                kernel_variant: null(),
                is_symmetric: false,
                tag,
            },
        }
    }
}

fn function_name(function: Function) -> &'static CStr {
    match function {
        Function::Send => c"Send",
        Function::Recv => c"Recv",
        Function::AlltoAll => c"AlltoAll",
        Function::Gather => c"Gather",
        Function::Scatter => c"Scatter",
        Function::AllReduce => c"AllReduce",
        Function::Reduce => c"Reduce",
        Function::ReduceScatter => c"ReduceScatter",
        Function::AllGather => c"AllGather",
        Function::Broadcast => c"Broadcast",
    }
}

fn type_name(data_type: DataType) -> &'static CStr {
    match data_type {
        DataType::I8 => c"ncclInt8",
        // NCCL leaves this one out.
        DataType::U8 => c"Unknown",
        DataType::I32 => c"ncclInt32",
        DataType::U32 => c"ncclUint32",
        DataType::I64 => c"ncclInt64",
        DataType::U64 => c"ncclUint64",
        DataType::F16 => c"ncclFloat16",
        DataType::F32 => c"ncclFloat32",
        DataType::F64 => c"ncclFloat64",
        DataType::Bf16 => c"ncclBfloat16",
        DataType::F8E4M3 => c"ncclFloat8e4m3",
        DataType::F8E5M2 => c"ncclFloat8e5m2",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn members_of_a_descriptor_are_where_the_headers_of_the_plugins_have_them() {
        assert_eq!(offset_of!(Descriptor, of_kind), 24);
        assert_eq!(offset_of!(Coll, channels), 56);
        assert_eq!(offset_of!(Coll, algorithm), 64);
        assert_eq!(offset_of!(Coll, group), 80);
        assert_eq!(offset_of!(Coll, kernel_variant), 88);
        assert_eq!(offset_of!(Coll, tag), 104);
        assert_eq!(offset_of!(P2p, group), 40);
        assert_eq!(offset_of!(CollApi, captured), 40);
        assert_eq!(offset_of!(P2pApi, tag), 40);
        assert_eq!(offset_of!(ProxyOp, is_send), 20);
    }

    #[test]
    fn the_parent_of_a_task_is_its_group_before_version_5() {
        let place = |number: usize| Handle(std::ptr::without_provenance_mut(number));
        let event = Event {
            parent: place(8),
            rank: 3,
            kind: Kind::P2p {
                function: Function::Send,
                address: 0x100,
                data_type: DataType::F32,
                count: 5,
                peer: 1,
                group: place(16),
            },
        };
        assert_eq!(event.descriptor(4).parent.addr(), 16);
        assert_eq!(event.descriptor(5).parent.addr(), 8);
        assert_eq!(event.descriptor(4).kind, 4);
    }
}
