//! The subset of JSON that a report needs: values with ordered keys, written like nccl-tests' (no spaces, six
//! decimals).

use std::fmt;
use std::io::{self, Write};

use serde::{Serialize, Serializer};
use serde_json::ser::Formatter;

use crate::printf::fixed;

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// `null`
    Null,
    /// A whole number.
    Integer(i128),
    /// A finite number, with six decimals.
    Number(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// An object; keys keep their order.
    #[serde(serialize_with = "in_order")]
    Object(Vec<(&'static str, Value)>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// nccl-tests writes booleans as the strings `"true"` and `"false"`.
impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Text(truth.to_string())
    }
}

macro_rules! from_integers {
    ($($type:ty),*) => {
        $(impl From<$type> for Value {
            fn from(number: $type) -> Self {
                Self::Integer(number as i128)
            }
        })*
    };
}

from_integers!(u32, u64, usize);

/// nccl-tests writes `"nan"` for values that are no numbers.
impl From<f64> for Value {
    fn from(number: f64) -> Self {
        match number {
            _ if number.is_finite() => Self::Number(number),
            _ if number.is_nan() => "nan".into(),
            _ => fixed(number, 6).into(),
        }
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl<T: Into<Value>> FromIterator<T> for Value {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self::List(values.into_iter().map(Into::into).collect())
    }
}

fn in_order<S: Serializer>(entries: &[(&str, Value)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(entries.iter().map(|(key, value)| (key, value)))
}

/// Writes numbers as `%f` does.
struct SixDecimals;

impl Formatter for SixDecimals {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(fixed(value, 6).as_bytes())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut json = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut json, SixDecimals);
        self.serialize(&mut serializer).map_err(|_| fmt::Error)?;
        f.write_str(&String::from_utf8_lossy(&json))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_with_any_parser() {
        let text = "quote \" backslash \\ newline \n tab \t bell \u{7} umlaut ü slash /";
        let value = Value::Object(vec![
            ("text", text.into()),
            ("list", [1.5, -0.25].into_iter().collect()),
            ("nothing", None::<u64>.into()),
            ("count", u64::MAX.into()),
            ("truth", true.into()),
            ("no number", f64::NAN.into()),
            ("too much", f64::INFINITY.into()),
            ("too little", f64::NEG_INFINITY.into()),
            ("empty", Value::Object(Vec::new())),
        ]);
        let read: serde_json::Value = serde_json::from_str(&value.to_string()).unwrap();
        assert_eq!(read["text"], text);
        assert_eq!(read["list"], serde_json::json!([1.5, -0.25]));
        assert_eq!(read["nothing"], serde_json::Value::Null);
        assert_eq!(read["count"], u64::MAX);
        assert_eq!(read["truth"], "true");
        assert_eq!(read["no number"], "nan");
        assert_eq!(read["too much"], "inf");
        assert_eq!(read["too little"], "-inf");
        assert_eq!(read["empty"], serde_json::json!({}));
    }

    #[test]
    fn it_is_written_as_by_nccl_tests() {
        let row = [("time", 1.0.into()), ("a", Value::from_iter([0.25, 1e9]))];
        assert_eq!(
            Value::Object(row.into()).to_string(),
            r#"{"time":1.000000,"a":[0.250000,1000000000.000000]}"#
        );
    }
}
