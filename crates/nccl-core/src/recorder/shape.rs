//! The shape of a recorded call, for an error that another thread reports.

use super::snapshot::{self, RecordedOperation};
use super::track::Track;
use crate::operation::{OperationKind, Shape};

/// How many operations are examined; common properties show in the first of them.
const LOOKED_AT: u64 = 4;

impl Track {
    /// The shape of call `sequence`, as far as its record is still there.
    pub(crate) fn shape_of(&self, sequence: u64) -> Shape {
        // Each sequence number is one record, from 1 on.
        let raw = sequence
            .checked_sub(1)
            .and_then(|at| self.call_ring.get(at));
        let Some(raw) = raw.filter(|raw| raw.sequence == sequence) else {
            return Shape::default();
        };
        let kind = OperationKind::from_code((raw.state >> 8) as u8);
        let indices = raw.first..raw.first.saturating_add(raw.count.min(LOOKED_AT));
        let operations: Vec<_> = indices
            .filter_map(|index| snapshot::operation(self.operation_ring.get(index)?))
            .collect();
        shape(kind, self.identity.rank, &operations)
    }
}

/// The shape of a call on rank `own` that is made of `operations`.
fn shape(kind: OperationKind, own: usize, operations: &[RecordedOperation]) -> Shape {
    let Some(first) = operations.first() else {
        return Shape::default();
    };
    let peer_of = |side: OperationKind| {
        let mut all = operations.iter();
        all.find(|one| one.kind == side).and_then(|one| one.peer)
    };
    match kind {
        // Such a call has a different shape for each operation.
        OperationKind::Group | OperationKind::Capture | OperationKind::Replay => Shape::default(),
        OperationKind::AllToAllV
        | OperationKind::Route
        | OperationKind::Dispatch
        | OperationKind::Combine => Shape {
            data_type: Some(first.data_type),
            ..Shape::default()
        },
        _ if first.kind == kind => Shape {
            peer: first.peer,
            root: first.root,
            count: usize::try_from(first.count).ok(),
            data_type: Some(first.data_type),
            reduction: first.reduction,
        },
        // Made of messages. The root of a gather sends nothing, or only to itself.
        _ => Shape {
            peer: None,
            root: match kind {
                OperationKind::Gather => peer_of(OperationKind::Send).or(Some(own)),
                OperationKind::Scatter => peer_of(OperationKind::Recv).or(Some(own)),
                _ => None,
            },
            count: usize::try_from(first.count).ok(),
            data_type: Some(first.data_type),
            reduction: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DataType;

    fn message(kind: OperationKind, peer: usize) -> RecordedOperation {
        RecordedOperation {
            kind,
            count: 7,
            data_type: DataType::Float32,
            peer: Some(peer),
            message: Some(1),
            root: None,
            reduction: None,
        }
    }

    #[test]
    fn a_collective_that_is_made_of_messages_has_the_shape_that_its_caller_gave() {
        use OperationKind::{AllToAll, AllToAllV, Gather, Group, Recv, Scatter, Send};
        let both = [message(Send, 0), message(Recv, 0)];
        let all_to_all = shape(AllToAll, 1, &both);
        assert_eq!((all_to_all.count, all_to_all.peer), (Some(7), None));
        assert_eq!(all_to_all.root, None);
        assert_eq!(shape(Gather, 1, &[message(Send, 3)]).root, Some(3));
        assert_eq!(shape(Gather, 3, &[message(Recv, 0)]).root, Some(3));
        assert_eq!(shape(Scatter, 1, &[message(Recv, 3)]).root, Some(3));
        assert_eq!(shape(Scatter, 3, &[message(Send, 0)]).root, Some(3));
        let uneven = shape(AllToAllV, 1, &both);
        assert_eq!(
            (uneven.count, uneven.data_type),
            (None, Some(DataType::Float32))
        );
        assert_eq!(shape(Group, 1, &both), Shape::default());
        assert_eq!(shape(AllToAll, 1, &[]), Shape::default());
    }
}
