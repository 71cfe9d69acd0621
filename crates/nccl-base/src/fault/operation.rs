//! The operation that a fault is about: as text for display, and as values to compare.

use serde::{Deserialize, Serialize};

use crate::operation::{Operation, OperationKind};

/// The operation of a fault; empty if the fault is not about an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct FaultOperation {
    /// The text for display.
    #[serde(
        rename = "operation",
        default,
        skip_serializing_if = "String::is_empty"
    )]
    pub text: String,
    /// The kind of the operation.
    #[serde(
        rename = "operation_kind",
        with = "by_name",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub kind: Option<OperationKind>,
    /// Its number on its communicator.
    #[serde(
        rename = "operation_sequence",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub sequence: Option<u64>,
}

impl FaultOperation {
    /// Returns the operation that creates a communicator.
    #[doc(hidden)]
    pub fn init(communicator: &str) -> Self {
        Self {
            text: format!("init of {communicator}"),
            kind: Some(OperationKind::Init),
            sequence: None,
        }
    }
}

impl From<&Operation> for FaultOperation {
    fn from(operation: &Operation) -> Self {
        Self {
            text: operation.what().to_string(),
            kind: Some(operation.kind),
            sequence: operation.sequence,
        }
    }
}

/// Serializes a kind as its name; a kind that this release does not know becomes none.
mod by_name {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::operation::OperationKind;

    pub(super) fn serialize<S: Serializer>(
        kind: &Option<OperationKind>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        kind.map(OperationKind::name).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<OperationKind>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        let mut known = OperationKind::ALL.into_iter();
        Ok(name.and_then(|name| known.find(|kind| kind.name() == name)))
    }
}
