//! The public types that may cross threads: a change of this table is a change of the API.

macro_rules! table {
    ($($type:ty: $($what:ident)*;)*) => {
        $(const _: () = {
            fn is<T: $($what +)* ?Sized>() {}
            let _ = is::<$type>;
        };)*
    };
}

table! {
    nccl::AbortSignal: Send Sync Clone Unpin;
    nccl::all_to_all::AllToAll: Send Sync Unpin;
    nccl::all_to_all::AllToAllAlgorithm: Send Sync Copy Unpin;
    nccl::all_to_all::AllToAllBuilder<'static>: Send Sync Unpin;
    nccl::all_to_all::Alternative: Send Sync Clone Unpin;
    nccl::AtRunTime: Send Sync Copy Unpin;
    nccl::Buffer<f32>: Send Sync Unpin;
    nccl::Capability: Send Sync Copy Unpin;
    nccl::plan::Capture<'static>: Send Unpin;
    nccl::plan::CapturedPlan<(nccl::Registered<nccl::Buffer<f32>>, Vec<nccl::Buffer<u8>>)>: Send Sync Unpin;
    nccl::plan::CapturedPlan<nccl::Buffer<f32>>: Send Sync Unpin;
    nccl::Communicator: Send Sync Clone Unpin;
    nccl::CommunicatorBuilder<'static>: Send Unpin;
    nccl::Config: Send Sync Clone Unpin;
    nccl::all_to_all::CostModel: Send Sync Copy Unpin;
    nccl::moe::Counts: Send Sync Clone Unpin;
    nccl::CtaPolicy: Send Sync Copy Unpin;
    nccl::DataType: Send Sync Copy Unpin;
    nccl::Erased<'static>: Send Sync Unpin;
    nccl::ErasedMut<'static>: Send Sync Unpin;
    nccl::Error: Send Sync Unpin;
    nccl::ErrorKind: Send Sync Unpin;
    nccl::all_to_all::Explanation: Send Sync Clone Unpin;
    nccl::plan::CapturedPlan<(nccl::moe::Routing, nccl::Buffer<f32>)>: Send Sync Unpin;
    nccl::plan::RenewablePlan<nccl::Buffer<f32>>: Send Unpin;
    nccl::moe::DispatchWay: Send Sync Copy Unpin;
    nccl::moe::ExpertCapture<'static, 'static>: Send Unpin;
    nccl::moe::RoutingMut<'static>: Send Sync Unpin;
    nccl::moe::ExpertLayout: Send Sync Copy Unpin;
    nccl::moe::ExpertParallel: Send Sync Unpin;
    nccl::moe::ExpertParallelBuilder<'static>: Send Unpin;
    nccl::Group<'static>: Send Unpin;
    nccl::Groups<'static>: Send Unpin;
    nccl::launch::Event: Send Sync Clone Unpin;
    nccl::launch::Events: Send Sync Unpin;
    nccl::launch::Exit: Send Sync Copy Unpin;
    nccl::launch::Fleet: Send Sync Unpin;
    nccl::launch::FleetBuilder: Send Sync Clone Unpin;
    nccl::launch::OomKill: Send Sync Clone Unpin;
    nccl::launch::Output: Send Sync Clone Unpin;
    nccl::launch::RankEnd: Send Sync Clone Unpin;
    nccl::launch::Report: Send Sync Clone Unpin;
    nccl::launch::Signal: Send Sync Copy Unpin;
    nccl::Library: Send Sync Clone Unpin;
    nccl::metrics::Sampler: Send Sync Unpin;
    nccl::all_to_all::LinkCost: Send Sync Copy Unpin;
    nccl::error::NcclFailure: Send Sync Unpin;
    nccl::all_to_all::Nodes: Send Sync Copy Unpin;
    nccl::Operation: Send Sync Clone Unpin;
    nccl::OperationKind: Send Sync Copy Unpin;
    nccl::all_to_all::Parts<'static>: Send Sync Copy Unpin;
    nccl::PreMulSum<f32>: Send Sync Unpin;
    nccl::ReduceOp: Send Sync Copy Unpin;
    nccl::Registered<nccl::Buffer<f32>>: Send Sync Unpin;
    nccl::Rendezvous: Send Sync Clone Unpin;
    nccl::Request: Send Sync Unpin;
    nccl::Requests: Send Sync Unpin;
    nccl::stats::Stats: Send Sync Clone Unpin;
    nccl::stats::CommunicatorStats: Send Sync Clone Unpin;
    nccl::stats::Durations: Send Sync Clone Unpin;
    nccl::stats::Faults: Send Sync Copy Unpin;
    nccl::stats::LibraryInfo: Send Sync Clone Unpin;
    nccl::stats::OperationStats: Send Sync Copy Unpin;
    nccl::stats::RanksByState: Send Sync Copy Unpin;
    nccl::stats::WorldStats: Send Sync Clone Unpin;
    nccl::moe::Routing: Send Sync Unpin;
    nccl::error::StreamRefusal: Send Sync Copy Unpin;
    nccl::control::Secret: Send Sync Clone Unpin;
    nccl::control::Subgroup<'static>: Send Sync Unpin;
    nccl::UniqueId: Send Sync Copy Unpin;
    nccl::Version: Send Sync Copy Unpin;
    nccl::control::Events: Send Sync Unpin;
    nccl::control::WorldEvent: Send Sync Clone Unpin;
    nccl::World: Send Sync Unpin;
    nccl_emulator::Violation: Send Sync Clone Unpin;
    nccl_sys::Api: Send Sync Copy Unpin;
    nccl_sys::Loaded: Send Sync Clone Unpin;
}

#[test]
fn the_table_compiles() {}
