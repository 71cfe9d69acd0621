//! The little of JSON that a report needs: values with ordered keys, written like nccl-tests' (no
//! spaces, six decimals).

use std::fmt;

use crate::printf::fixed;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// A whole number.
    Integer(i128),
    /// A number with six decimals. nccl-tests writes `"nan"` for what is none, and so does this.
    Number(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// An object; keys keep their order.
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

/// nccl-tests writes truth as the strings `"true"` and `"false"`.
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

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Number(number)
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

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Number(number) if number.is_finite() => f.write_str(&fixed(*number, 6)),
            Self::Number(number) if number.is_nan() => f.write_str("\"nan\""),
            Self::Number(number) => write!(f, "\"{}\"", fixed(*number, 6)),
            Self::Text(text) => quote(f, text),
            Self::List(values) => {
                f.write_str("[")?;
                for (index, value) in values.iter().enumerate() {
                    let comma = if index > 0 { "," } else { "" };
                    write!(f, "{comma}{value}")?;
                }
                f.write_str("]")
            }
            Self::Object(entries) => {
                f.write_str("{")?;
                for (index, (key, value)) in entries.iter().enumerate() {
                    let comma = if index > 0 { "," } else { "" };
                    write!(f, "{comma}\"{key}\":{value}")?;
                }
                f.write_str("}")
            }
        }
    }
}

fn quote(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str("\"")?;
    for character in text.chars() {
        match character {
            '"' => f.write_str("\\\"")?,
            '\\' => f.write_str("\\\\")?,
            '\n' => f.write_str("\\n")?,
            '\t' => f.write_str("\\t")?,
            '\r' => f.write_str("\\r")?,
            control if control < ' ' => write!(f, "\\u{:04x}", u32::from(control))?,
            other => write!(f, "{other}")?,
        }
    }
    f.write_str("\"")
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
        assert_eq!(read["empty"], serde_json::json!({}));
    }

    #[test]
    fn numbers_have_six_decimals_as_in_nccl_tests() {
        assert_eq!(Value::from(1.0).to_string(), "1.000000");
    }
}
