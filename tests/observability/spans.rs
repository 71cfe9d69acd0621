//! The span of the program in which a call was made.

use nccl::{ReduceOp, World};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::Outcome;
use crate::seen::Values;
use crate::support::{self, ranks_as_threads};

/// The fields of a span that a layer of the program keeps.
struct Fields(String);

struct Keeper;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Keeper {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        id: &tracing::span::Id,
        context: Context<'_, S>,
    ) {
        let mut values = Values::default();
        attributes.record(&mut values);
        let fields = values
            .0
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        let fields = Fields(fields.collect::<Vec<_>>().join(" "));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }
}

fn calls_are_made_in_spans(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("observed/spans")
        .stream(&stream)
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    let mut call = || comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait();
    // No layer is interested.
    let unheard = tracing::info_span!("step", number = 16).entered();
    call()?;
    drop(unheard);
    let registry: tracing::Dispatch = tracing_subscriber::registry().with(Keeper).into();
    let listening = tracing::dispatcher::set_default(&registry);
    let step = tracing::info_span!("step", number = 17).entered();
    call()?;
    let inner = tracing::info_span!("request", user = "ada").entered();
    call()?;
    let id = inner.id().ok_or("somebody listens")?.into_u64();
    drop(inner);
    call()?;
    drop(step);
    call()?;
    drop(listening);
    call()?;
    let names = |recording: &nccl::recorder::Recording| -> Vec<Option<String>> {
        let spans = recording.calls.iter().map(|call| call.span.as_ref());
        spans
            .map(|span| span.map(|span| span.name.clone()))
            .collect()
    };
    let expected = [
        None,
        Some("step"),
        Some("request"),
        Some("step"),
        None,
        None,
    ];
    let expected = expected.map(|name| name.map(str::to_owned));
    assert_eq!(names(&comm.recording()), expected);

    let again = tracing::dispatcher::set_default(&registry);
    let open = tracing::info_span!("step", number = 18).entered();
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    nccl::recorder::describe_spans(move |asked| {
        if asked == id {
            panic!("of one that is over");
        }
        let registry = registry.downcast_ref::<tracing_subscriber::Registry>()?;
        let span = registry.span(&tracing::Id::from_u64(asked))?;
        let fields = span.extensions().get::<Fields>()?.0.clone();
        Some(fields)
    });
    let recording = comm.recording();
    let spans: Vec<_> = recording
        .calls
        .iter()
        .filter_map(|call| call.span.as_ref())
        .collect();
    let [step, request, .., last] = &spans[..] else {
        return Err(format!("four in spans: {spans:?}").into());
    };
    assert_eq!(
        (request.id, &request.about),
        (id, &None),
        "its description panics"
    );
    assert_eq!(step.about, None, "it is over");
    assert_eq!(last.about.as_deref(), Some("number=18"));
    drop(open);
    drop(again);
    let timeline = nccl::recorder::Timeline::merge(vec![nccl::recorder::snapshot()])?;
    let page = timeline.to_html();
    assert!(
        page.contains("in span \\\"step\\\", number"),
        "the page's tip says it: {page}"
    );
    Ok(())
}

#[test]
fn a_call_says_in_which_span_of_the_program_it_was_made() {
    ranks_as_threads(1, calls_are_made_in_spans);
}
