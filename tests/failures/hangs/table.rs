//! The effects of hanging calls, call by call: the table of `docs/deadlines-and-abort.md`, which is compared with this
//! one, and of which every row is tried.

use std::time::Duration;

use nccl::LaunchMode;

use crate::support;

/// The timeouts of every communicator here: short, and all different.
pub(crate) const INIT: Duration = Duration::from_secs(3);
pub(crate) const OPERATION: Duration = Duration::from_millis(1000);
pub(crate) const FINALIZE: Duration = Duration::from_millis(800);
pub(crate) const CONFIRM: Duration = Duration::from_millis(700);
/// NVIDIA's library checks twice a second whether it is aborted, and sleeps up to 3.4 s between two attempts to
/// connect.
pub(crate) fn abort() -> Duration {
    match support::on_nvidias() {
        true => Duration::from_secs(5),
        false => Duration::from_millis(500),
    }
}

/// The timeout of operations without a communicator.
const DEFAULT_OPERATION: Duration = Duration::from_secs(30);

/// The operation of the rank that makes the call; named after this crate's method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Absent,
    Build,
    FirstContact,
    First,
    AllReduce,
    AllReduceElsewhere,
    Group,
    AllToAll,
    Wait,
    Await,
    Abort,
    AbortLent,
    AbortOwned,
    Finalize,
    DropCommunicator,
    Buffer,
    DropBuffer,
    Register,
    RegisterWindow,
    Memory,
    Suspend,
    IntoInner,
    DropRegistered,
    PreMulSum,
    DropOperator,
    FromRaw,
    Capture,
    Launch,
    IntoBuffers,
    DropPlan,
    Split,
    Shrink,
    ShrinkAborting,
    Revoke,
    Grow,
    GrowNew,
}

/// The result on the rank with the hanging call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The call fails with this kind of error, or one of these, with this text.
    Error(&'static str, &'static str),
    /// The call succeeds, as if there was no fault.
    Returns,
    /// The process ends, with this sentence.
    Process(&'static str),
}

/// The result on the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// Their calls fail, with this rank as the cause.
    Told,
    /// Their calls fail, with no rank as the cause, and with this one as the first that timed out: it may have waited
    /// for them.
    ToldFirst,
    /// Their calls fail; the cause is the rank that this one waits for, and that does not enter.
    ToldOfPeer,
    /// Their call fails as well, with or without the reason.
    Fail,
    /// They are not affected.
    Unharmed,
}

/// The time bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    AtOnce,
    Init,
    HalfInit,
    Operation,
    OperationAndAbort,
    Abort,
    InitAndAbort,
    OrderlyEnd,
    Sentinel,
    DefaultOperation,
}

impl Bound {
    /// The bound with the timeouts of these tests.
    pub(crate) fn time(self) -> Duration {
        let sentinel = OPERATION + Duration::from_secs(2) + abort() + Duration::from_secs(6);
        match self {
            Self::AtOnce => Duration::ZERO,
            Self::Init => INIT + abort() + CONFIRM,
            Self::HalfInit => INIT / 2,
            Self::Operation => OPERATION,
            Self::OperationAndAbort => OPERATION + Duration::from_secs(1) + abort() + CONFIRM,
            Self::Abort => abort() + CONFIRM,
            Self::InitAndAbort => INIT + Duration::from_secs(2) + abort() + CONFIRM,
            Self::OrderlyEnd => FINALIZE + Duration::from_secs(1) + abort() + CONFIRM,
            Self::Sentinel => sentinel,
            Self::DefaultOperation => DEFAULT_OPERATION,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::AtOnce => "at once",
            Self::Init => "init",
            Self::HalfInit => "half of init",
            Self::Operation => "operation",
            Self::OperationAndAbort => "operation + 1 s + abort",
            Self::Abort => "abort",
            Self::InitAndAbort => "init + 2 s + abort",
            Self::OrderlyEnd => "finalize + 1 s + abort",
            Self::Sentinel => "operation + 2 s + abort + 5 s",
            Self::DefaultOperation => "30 s",
        }
    }
}

/// The differences in launch mode `BlockingChild`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockingChild {
    /// None.
    Same,
    /// Another result.
    Other(Ends, Bound, Others),
}

#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// The C function that hangs; empty where a rank does not enter.
    pub(crate) call: &'static str,
    /// The rank of the call.
    pub(crate) rank: usize,
    pub(crate) program: Program,
    pub(crate) ends: Ends,
    pub(crate) bound: Bound,
    pub(crate) others: Others,
    in_child: BlockingChild,
}

const fn row(
    program: Program,
    call: &'static str,
    ends: Ends,
    bound: Bound,
    others: Others,
) -> Row {
    Row {
        call,
        rank: 1,
        program,
        ends,
        bound,
        others,
        in_child: BlockingChild::Same,
    }
}

impl Row {
    /// The row in `mode`.
    pub(crate) fn of(self, mode: LaunchMode) -> Self {
        match (mode, self.in_child) {
            (LaunchMode::BlockingChild, BlockingChild::Other(ends, bound, others)) => Self {
                ends,
                bound,
                others,
                ..self
            },
            _ => self,
        }
    }

    /// Whether the page has a line of its own for each launch mode.
    pub(crate) fn differs(&self) -> bool {
        matches!(self.in_child, BlockingChild::Other(..))
    }

    const fn other(mut self, ends: Ends, bound: Bound, others: Others) -> Self {
        self.in_child = BlockingChild::Other(ends, bound, others);
        self
    }

    const fn on_rank(mut self, rank: usize) -> Self {
        self.rank = rank;
        self
    }

    /// The row of the page.
    pub(crate) fn line(&self) -> String {
        let what = match self.call {
            "" => String::from("(another rank never comes)"),
            call => format!("`{call}`"),
        };
        let ours = match self.program {
            Program::Absent | Program::Build => "`build`",
            Program::FirstContact | Program::First => "an operation, the first with its peer",
            Program::AllReduce => "an operation",
            Program::AllReduceElsewhere => "an operation on a buffer of another stream",
            Program::Group => "a group",
            Program::AllToAll => "an all-to-all in steps",
            Program::Wait => "`Request::wait`",
            Program::Await => "`.await`, in the thread that looks after it",
            Program::Abort => "`abort`",
            Program::AbortLent => "an abort under an operation on lent memory",
            Program::AbortOwned => "an abort under a plan, which owns its memory",
            Program::Finalize => "`finalize`",
            Program::DropCommunicator => "drop of a communicator",
            Program::Buffer => "`Communicator::buffer`",
            Program::DropBuffer => "drop of a `Buffer`",
            Program::Register => "`register`",
            Program::RegisterWindow => "`register_window`",
            Program::Memory => "`Communicator::memory`",
            Program::Suspend => "`suspend`",
            Program::IntoInner => "`Registered::into_inner`",
            Program::DropRegistered => "drop of a `Registered`",
            Program::PreMulSum => "`pre_mul_sum`",
            Program::DropOperator => "drop of a `PreMulSum`",
            Program::FromRaw => "`from_raw`",
            Program::Capture => "`capture`",
            Program::Launch => "`CapturedPlan::launch`",
            Program::IntoBuffers => "`into_buffers`",
            Program::DropPlan => "drop of a plan",
            Program::Split => "`split`",
            Program::Shrink => "`shrink`",
            Program::ShrinkAborting => "`shrink_aborting`",
            Program::Revoke => "`revoke`",
            Program::Grow => "`grow`",
            Program::GrowNew => "`build`, of a rank that is new to one that grows",
        };
        let ends = match self.ends {
            Ends::Error(kind, _) => format!("`{kind}`").replace(" or ", "` or `"),
            Ends::Returns => String::from("returns"),
            Ends::Process(_) => String::from("the process ends"),
        };
        let others = match self.others {
            Others::Told => "fail with this rank as the cause",
            Others::ToldFirst => "fail without a cause, this rank ran out of time first",
            Others::ToldOfPeer => "fail with the rank as the cause that did not come",
            Others::Fail => "fail",
            Others::Unharmed => "go on",
        };
        format!(
            "| {ours} | {what} | {ends} | {} | {others} |",
            self.bound.text()
        )
    }
}

/// Blocking calls that this crate does not make, so that they have no row; with the reason.
pub(crate) const NEVER_CALLED: &[(&str, &str)] = &[
    ("ncclCommInitRank", "always blocks"),
    ("ncclCommInitAll", "always blocks"),
    ("cuEventSynchronize", "waits without a timeout"),
    ("cuStreamSynchronize", "waits without a timeout"),
];

/// The line of the page about one of these.
pub(crate) fn never_called((call, why): (&str, &str)) -> String {
    format!("| (none) | `{call}` | is never called: {why} | | |")
}

const NOT_BACK: &str = "has not returned";

/// All of them.
pub(crate) const ROWS: &[Row] = {
    use Bound::{
        Abort, AtOnce, DefaultOperation, HalfInit, Init, InitAndAbort, Operation,
        OperationAndAbort, OrderlyEnd, Sentinel,
    };
    use Ends::{Error, Process, Returns};
    use Others::{Fail, Told, ToldFirst, ToldOfPeer, Unharmed};
    use Program as P;
    const OUT: &str = "TimedOut";
    const INSIDE: Ends = Process("a thread has been inside");
    &[
        row(P::Absent, "", Error(OUT, "rank 1"), Init, Unharmed).on_rank(0),
        row(
            P::Build,
            "ncclGetUniqueId",
            Error(OUT, NOT_BACK),
            HalfInit,
            Fail,
        )
        .on_rank(0),
        row(
            P::Build,
            "ncclCommInitRankConfig",
            Error(OUT, NOT_BACK),
            Init,
            Told,
        ),
        row(
            P::Build,
            "ncclCommGetAsyncError",
            Error(OUT, NOT_BACK),
            Init,
            Told,
        ),
        row(P::Build, "ncclCommSplit", Returns, Init, Unharmed).other(
            Error(OUT, NOT_BACK),
            Init,
            Told,
        ),
        row(
            P::Build,
            "cuStreamCreate",
            Error(OUT, NOT_BACK),
            HalfInit,
            Fail,
        ),
        row(
            P::Build,
            "cuEventCreate",
            Error(OUT, NOT_BACK),
            HalfInit,
            Fail,
        ),
        row(
            P::FirstContact,
            "",
            Error(OUT, ""),
            OperationAndAbort,
            ToldOfPeer,
        )
        .on_rank(0),
        row(
            P::First,
            "ncclCommGetAsyncError",
            INSIDE,
            Sentinel,
            Unharmed,
        )
        .other(Returns, AtOnce, Unharmed),
        row(P::AllReduce, "ncclAllReduce", INSIDE, Sentinel, Told),
        row(P::AllReduce, "cuStreamIsCapturing", INSIDE, Sentinel, Told),
        row(
            P::AllReduceElsewhere,
            "cuEventRecord",
            INSIDE,
            Sentinel,
            Told,
        ),
        row(
            P::AllReduceElsewhere,
            "cuStreamWaitEvent",
            INSIDE,
            Sentinel,
            Told,
        ),
        row(P::Group, "ncclGroupStart", INSIDE, Sentinel, Told),
        row(P::Group, "ncclSend", INSIDE, Sentinel, Told),
        row(P::Group, "ncclRecv", INSIDE, Sentinel, Told),
        row(P::Group, "ncclGroupEnd", INSIDE, Sentinel, Told),
        row(P::Group, "cuStreamWaitEvent", INSIDE, Sentinel, Told),
        row(P::AllToAll, "cuStreamIsCapturing", INSIDE, Sentinel, Told),
        row(P::AllToAll, "cuStreamWaitEvent", INSIDE, Sentinel, Told),
        row(P::Wait, "cuEventRecord", INSIDE, Sentinel, ToldOfPeer),
        row(P::Wait, "cuEventQuery", INSIDE, Sentinel, ToldOfPeer),
        row(
            P::Wait,
            "ncclCommGetAsyncError",
            INSIDE,
            Sentinel,
            ToldOfPeer,
        ),
        row(
            P::Await,
            "cuEventQuery",
            Error("TimedOut or Aborted", ""),
            Sentinel,
            ToldOfPeer,
        ),
        row(
            P::Abort,
            "ncclCommAbort",
            Error(OUT, "ncclCommAbort"),
            Abort,
            Told,
        ),
        row(
            P::AbortLent,
            "ncclCommAbort",
            Process("may still use memory that was lent"),
            Sentinel,
            Told,
        )
        .other(INSIDE, Sentinel, Told),
        row(
            P::AbortOwned,
            "ncclCommAbort",
            Error(OUT, "replay"),
            OperationAndAbort,
            ToldOfPeer,
        ),
        row(
            P::Finalize,
            "ncclCommFinalize",
            Error(OUT, "finalize"),
            OrderlyEnd,
            ToldFirst,
        ),
        row(
            P::Finalize,
            "ncclCommGetAsyncError",
            Error(OUT, "finalize"),
            OrderlyEnd,
            Unharmed,
        ),
        row(
            P::Finalize,
            "ncclCommDestroy",
            Error(OUT, "finalize"),
            OrderlyEnd,
            Unharmed,
        ),
        row(
            P::DropCommunicator,
            "ncclCommFinalize",
            Returns,
            AtOnce,
            Unharmed,
        ),
        row(
            P::DropCommunicator,
            "ncclCommDestroy",
            Returns,
            AtOnce,
            Unharmed,
        ),
        row(
            P::DropCommunicator,
            "ncclCommAbort",
            Returns,
            AtOnce,
            Unharmed,
        ),
        row(
            P::Buffer,
            "ncclMemAlloc",
            Error(OUT, NOT_BACK),
            Operation,
            Unharmed,
        ),
        row(P::DropBuffer, "ncclMemFree", Returns, AtOnce, Unharmed),
        row(P::DropBuffer, "cuEventQuery", Returns, AtOnce, Unharmed),
        row(
            P::Register,
            "ncclCommRegister",
            Error(OUT, NOT_BACK),
            OperationAndAbort,
            Told,
        ),
        row(
            P::RegisterWindow,
            "ncclCommWindowRegister",
            Error(OUT, NOT_BACK),
            OperationAndAbort,
            Told,
        ),
        row(
            P::Memory,
            "ncclCommMemStats",
            Error(OUT, NOT_BACK),
            Operation,
            Unharmed,
        ),
        row(
            P::Suspend,
            "ncclCommSuspend",
            Error(OUT, NOT_BACK),
            OperationAndAbort,
            Told,
        )
        .other(Error("InvalidConfig", "suspendable"), AtOnce, Unharmed),
        row(
            P::IntoInner,
            "ncclCommDeregister",
            Error(OUT, NOT_BACK),
            OperationAndAbort,
            Told,
        ),
        row(
            P::DropRegistered,
            "ncclCommDeregister",
            Returns,
            AtOnce,
            Unharmed,
        ),
        row(
            P::PreMulSum,
            "ncclRedOpCreatePreMulSum",
            Error(OUT, NOT_BACK),
            OperationAndAbort,
            Told,
        ),
        row(
            P::DropOperator,
            "ncclRedOpDestroy",
            Returns,
            AtOnce,
            Unharmed,
        ),
        row(
            P::FromRaw,
            "ncclCommCount",
            Error(OUT, NOT_BACK),
            DefaultOperation,
            Unharmed,
        ),
        row(P::Capture, "cuStreamBeginCapture", INSIDE, Sentinel, Told),
        row(P::Capture, "cuStreamEndCapture", INSIDE, Sentinel, Told),
        row(
            P::Capture,
            "cuGraphInstantiateWithFlags",
            INSIDE,
            Sentinel,
            Told,
        ),
        row(P::Launch, "cuGraphLaunch", INSIDE, Sentinel, Told),
        row(P::IntoBuffers, "cuGraphExecDestroy", INSIDE, Sentinel, Told),
        row(P::DropPlan, "cuGraphExecDestroy", Returns, AtOnce, Unharmed),
        row(P::Split, "cuMemcpyDtoHAsync", INSIDE, Sentinel, Told),
        row(
            P::Shrink,
            "ncclCommShrink",
            Error(OUT, "ncclCommShrink"),
            InitAndAbort,
            ToldFirst,
        ),
        row(
            P::Shrink,
            "ncclCommGetAsyncError",
            Error(OUT, "ncclCommShrink"),
            InitAndAbort,
            ToldFirst,
        ),
        row(
            P::ShrinkAborting,
            "ncclCommShrink",
            Error(OUT, "ncclCommShrink"),
            InitAndAbort,
            ToldFirst,
        )
        .other(Returns, Init, Unharmed),
        row(
            P::Revoke,
            "ncclCommRevoke",
            Error(OUT, "ncclCommRevoke"),
            Abort,
            Told,
        )
        .other(Returns, Abort, Told),
        row(
            P::Grow,
            "ncclCommGetUniqueId",
            Error(OUT, NOT_BACK),
            HalfInit,
            Fail,
        )
        .on_rank(0),
        row(P::Grow, "ncclCommGrow", Error(OUT, NOT_BACK), Init, Told).on_rank(0),
        row(
            P::Grow,
            "ncclCommGetAsyncError",
            Error(OUT, NOT_BACK),
            Init,
            Told,
        )
        .on_rank(0),
        row(P::GrowNew, "ncclCommGrow", Error(OUT, NOT_BACK), Init, Told),
    ]
};
