//! Generation without a server: the smallest loop of continuous batching.
//!
//! Every rank runs the same loop with the same requests. Since all ranks have bitwise equal logits, all ranks draw the same
//! tokens without communication.

use crate::model::{Error, Part, Result, Row, Sampling};

/// A request to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The beginning of the text: at least one token.
    pub prompt: Vec<u32>,
    /// The most tokens to generate; fewer if the text ends or the cache is full earlier.
    pub most: usize,
    /// The sampling of tokens.
    pub sampling: Sampling,
}

/// A request that has a slot.
struct Running {
    number: usize,
    slot: usize,
    /// The prompt and the generated tokens.
    text: Vec<u32>,
    /// The number of these tokens that are in the cache.
    known: usize,
}

/// Generates the tokens of all requests, and returns them for each request. As many requests run at once as there are slots, in
/// the order of `requests`; prompts are processed in chunks of `chunk` tokens, in the same steps as the next tokens of the
/// other requests. `said` is called for each token as it is generated, with the number of its request.
///
/// ```
/// use inference_server::generate::{Request, generate};
/// use inference_server::model::tokenizer::{decode, encode};
/// use inference_server::model::{self, Alone, Decoder, Sampling, Settings, Shape, WeightsFile};
///
/// let file = WeightsFile::open(model::tiny())?;
/// let alone = Alone::new(Shape::new(file.config(), Settings::default().rows));
/// let mut decoder = Decoder::load(&file, alone, Settings::default())?;
/// let request = Request { prompt: encode("The communicator"), most: 20, sampling: Sampling::greedy() };
/// let made = generate(&mut decoder, &[request], 32, |_, _| {})?;
/// println!("{}", decode(&made[0]));
/// # Ok::<(), model::Error>(())
/// ```
///
/// # Errors
/// [`Error::Unusable`] for a request without a prompt, or one that is longer than the cache; those of
/// [`Part::step`].
pub fn generate<P: Part + ?Sized>(
    decoder: &mut P,
    requests: &[Request],
    chunk: usize,
    mut said: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>> {
    let settings = *decoder.settings();
    for (number, request) in requests.iter().enumerate() {
        let (length, most) = (request.prompt.len(), settings.positions);
        if length == 0 || length >= most {
            let text = format!(
                "the prompt of request {number} has {length} tokens: 1 to {} are possible",
                most - 1
            );
            return Err(Error::Unusable(text));
        }
    }
    let mut made = vec![Vec::new(); requests.len()];
    let mut free: Vec<usize> = (0..settings.slots).rev().collect();
    let mut waiting = (0..requests.len())
        .filter(|&number| requests[number].most > 0)
        .peekable();
    let mut running: Vec<Running> = Vec::new();
    while waiting.peek().is_some() || !running.is_empty() {
        while let (Some(&number), Some(&slot)) = (waiting.peek(), free.last()) {
            waiting.next();
            free.pop();
            running.push(Running {
                number,
                slot,
                text: requests[number].prompt.clone(),
                known: 0,
            });
        }
        let mut rows = Vec::new();
        // The index of each request's last row in this step.
        let mut ends = Vec::new();
        for one in &mut running {
            let room = (settings.rows - rows.len()).min(chunk.max(1));
            let to = (one.known + room).min(one.text.len());
            rows.extend((one.known..to).map(|position| Row {
                slot: one.slot,
                position,
                token: one.text[position],
                logits: position + 1 == one.text.len(),
            }));
            one.known = to;
            ends.push(rows.len().checked_sub(1));
        }
        let logits = decoder.step(&rows)?;
        for (one, end) in running.iter_mut().zip(ends) {
            let Some(logits) = end.and_then(|end| logits.row(end)) else {
                continue;
            };
            if one.known < one.text.len() {
                // The index is that of another request's row: the step had no room for this request.
                continue;
            }
            let token = requests[one.number].sampling.pick(logits, one.text.len());
            one.text.push(token);
            made[one.number].push(token);
            said(one.number, token);
        }
        running.retain(|one| {
            let request = &requests[one.number];
            let over = one.text.len() - request.prompt.len() == request.most
                || (one.text.len() > request.prompt.len()
                    && one.text.last().is_some_and(|&last| decoder.ends(last)))
                || one.text.len() == settings.positions;
            if over {
                free.push(one.slot);
            }
            !over
        });
    }
    Ok(made)
}
