//! One request's trace over two ranks, with this crate's spans and events in it, and the trace id in the flight
//! recorder.
//!
//! ```text
//! cargo run -p observability --bin opentelemetry
//! ```
//!
//! The ranks are threads, on the emulator where there is no GPU. Rank 0 takes a request and sends its trace context
//! along with the work; rank 1's span becomes its child. The exported spans are printed; a program would use an
//! exporter for OTLP.

use std::error::Error;
use std::time::Duration;

use nccl::{ReduceOp, World, recorder};
use nccl_tools::spawn::threads;
use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing::{Dispatch, Id, Level, Span, info_span};
use tracing_opentelemetry::{OpenTelemetrySpanExt as _, get_otel_context};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    nccl_emulator::install_unless_gpu()?;
    // Distinguishes processes; here all ranks are in one.
    let resource = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.name", "inference"))
        .with_attribute(KeyValue::new(
            "service.instance.id",
            std::process::id().to_string(),
        ))
        .build();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_simple_exporter(Printer)
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("inference"));
    let wanted = Targets::new().with_default(Level::INFO);
    let subscriber: Dispatch = tracing_subscriber::registry()
        .with(layer)
        .with(wanted)
        .into();
    tracing::dispatcher::set_global_default(subscriber.clone())?;
    // A hanging call then names its trace.
    recorder::describe_spans(move |id| {
        let context = get_otel_context(&Id::from_u64(id), &subscriber)?;
        let span = context.span().span_context().clone();
        Some(format!("trace {} span {}", span.trace_id(), span.span_id()))
    });

    threads::run(World::threads(2), None, |_, world| rank(&world))
        .map_err(|failure| failure.to_string())?;
    provider.shutdown()?;
    Ok(())
}

fn rank(world: &World) -> Outcome {
    let life = info_span!(
        "rank",
        nccl.rank = world.rank(),
        nccl.generation = world.generation()
    );
    let _life = life.enter();
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("model/tp").stream(&stream).build()?;
    let work = world.channel("work");
    let request = match world.rank() {
        0 => {
            let request = info_span!(parent: None, "request", user = "ada");
            work.send(&written(&request))?;
            request
        }
        _ => {
            let request = info_span!(parent: None, "request");
            let message = work.recv(Duration::from_secs(10))?;
            let message = message.ok_or("there is no work")?;
            request.set_parent(read(&message.bytes)?)?;
            request
        }
    };
    let _request = request.enter();
    let mut y = stream.clone_htod(&[1.0f32; 64])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    for call in comm.recording().calls {
        let span = call.span.ok_or("it was called in one")?;
        let about = span.about.unwrap_or_default();
        println!(
            "rank {}: {} #{} in {} ({about})",
            world.rank(),
            call.kind,
            call.sequence,
            span.name
        );
    }
    Ok(())
}

/// The context of a span, as bytes that travel with the work. A program that uses HTTP has a propagator for it.
fn written(span: &Span) -> Vec<u8> {
    let context = span.context();
    let span = context.span();
    let span = span.span_context();
    [&span.trace_id().to_bytes()[..], &span.span_id().to_bytes()].concat()
}

fn read(bytes: &[u8]) -> Outcome<Context> {
    let (trace, span) = bytes.split_at_checked(16).ok_or("too short")?;
    let span = SpanContext::new(
        TraceId::from_bytes(trace.try_into()?),
        SpanId::from_bytes(span.try_into()?),
        TraceFlags::SAMPLED,
        true,
        TraceState::default(),
    );
    Ok(Context::new().with_remote_span_context(span))
}

/// Prints the exported spans, a line each.
#[derive(Debug)]
struct Printer;

impl SpanExporter for Printer {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        for span in batch {
            let events: Vec<_> = span.events.iter().map(|event| &event.name).collect();
            let attributes = span
                .attributes
                .iter()
                .map(|one| format!("{}={}", one.key, one.value));
            println!(
                "exported: trace {} span {} {} {} {events:?}",
                span.span_context.trace_id(),
                span.span_context.span_id(),
                span.name,
                attributes.collect::<Vec<_>>().join(" ")
            );
        }
        Ok(())
    }
}
