//! A fault between ranks: as JSON, with the ranks of its communicator, and of bounded length.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::Fault;
use crate::sanitize;
use crate::wire::Broken;

/// The maximum length of a text that is sent, in bytes, and the maximum number of lines.
pub(super) const MAX_TEXT_BYTES: usize = 4096;
const MAX_TEXTS: usize = 16;

/// A fault as it is sent.
#[derive(Serialize, Deserialize)]
struct FaultMessage<'m> {
    members: Cow<'m, [usize]>,
    fault: Fault,
}

impl Fault {
    #[doc(hidden)]
    pub fn encode(&self, members: &[usize]) -> Vec<u8> {
        let mut fault = self.clone();
        fault.evidence.truncate(MAX_TEXTS);
        fault.also.truncate(MAX_TEXTS);
        fault.host_evidence.truncate(MAX_TEXTS);
        fault.shown().for_each(cut);
        // These are plain values, all of which can be serialized.
        serde_json::to_vec(&FaultMessage {
            members: Cow::Borrowed(members),
            fault,
        })
        .unwrap_or_default()
    }

    /// Returns the fault, and the ranks of its communicator in the world.
    #[doc(hidden)]
    pub fn decode(bytes: &[u8]) -> Result<(Self, Vec<usize>), Broken> {
        let mut message: FaultMessage<'_> =
            serde_json::from_slice(bytes).map_err(|_| Broken("a fault that cannot be read"))?;
        // The texts come from another process.
        let texts = message.fault.shown();
        texts.for_each(|text| *text = sanitize::text(text));
        Ok((message.fault, message.members.into_owned()))
    }

    /// Returns the texts that are only shown.
    fn shown(&mut self) -> impl Iterator<Item = &mut String> {
        let single = [
            &mut self.communicator,
            &mut self.host,
            &mut self.operation.text,
            &mut self.cause,
            &mut self.hint,
        ];
        let lists = self.evidence.iter_mut().chain(&mut self.host_evidence);
        single.into_iter().chain(lists)
    }
}

fn cut(text: &mut String) {
    let mut end = MAX_TEXT_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
