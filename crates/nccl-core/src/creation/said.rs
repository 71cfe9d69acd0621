//! What each rank says first when a communicator is to be made.

use nccl_base::codec::{Fields, put_bytes, put_index};

use crate::error::Error;
use crate::peers::Unmade;

/// What a rank says first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) failed: Option<String>,
    /// The fault that this is, as it travels.
    pub(super) fault: Vec<u8>,
    /// Its wish for a launch mode.
    pub(super) mode: u8,
    /// What stands against `BlockingChild` on this rank.
    pub(super) obstacle: Option<String>,
    /// Sealed; of rank 0, if it has one by now.
    pub(super) token: Vec<u8>,
    /// The communicator that it brought: which, and of how many ranks.
    pub(super) parent: Option<(String, usize)>,
    /// Why this rank cannot grow one.
    pub(super) cannot_grow: Option<String>,
}

impl Said {
    /// Of a rank that cannot take part.
    pub(super) fn failed(error: &Error, unborn: &dyn Unmade) -> Self {
        Self {
            failed: Some(error.kind().to_string()),
            fault: unborn.tell(error),
            ..Self::default()
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        put_index(&mut to, self.mode.into());
        put_bytes(&mut to, &self.token);
        put_bytes(&mut to, &self.fault);
        for text in [&self.failed, &self.cannot_grow, &self.obstacle] {
            put_index(&mut to, text.is_some().into());
            put_bytes(&mut to, text.as_deref().unwrap_or_default().as_bytes());
        }
        if let Some((key, size)) = &self.parent {
            put_index(&mut to, *size);
            put_bytes(&mut to, key.as_bytes());
        }
        to
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let mode = u8::try_from(fields.number().ok()?).ok()?;
        let token = fields.bytes().ok()?.to_vec();
        let fault = fields.bytes().ok()?.to_vec();
        let mut text = || {
            let is_there = fields.number().ok()? != 0;
            let text = fields.said().ok()?;
            Some(is_there.then_some(text))
        };
        let (failed, cannot_grow, obstacle) = (text()?, text()?, text()?);
        let parent = match fields.0.is_empty() {
            true => None,
            false => {
                let size = fields.index().ok()?;
                Some((fields.text().ok()?, size))
            }
        };
        Some(Self {
            failed,
            fault,
            mode,
            token,
            parent,
            cannot_grow,
            obstacle,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_survives_the_way_through_bytes() {
        for parent in [None, Some((String::from("0f"), 3))] {
            let said = Said {
                failed: Some(String::from("no memory")),
                fault: vec![4, 5],
                mode: 1,
                token: vec![1, 2, 3],
                parent,
                cannot_grow: Some(String::from("it is too old")),
                obstacle: Some(String::from("a variable")),
            };
            let bytes = said.encode();
            assert_eq!(Said::decode(&bytes).as_ref(), Some(&said));
            assert_eq!(Said::decode(&bytes[..bytes.len() - 1]), None);
        }
    }
}
