//! Values that ranks send each other as JSON ([`World::all_gather_value`](crate::World::all_gather_value)).
//!
//! A rank that cannot encode its value still takes part in the exchange and sends the reason, so that all ranks return
//! the same error.

use std::fmt::{self, Display};

use nccl_base::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::ser::{self, Serialize, Serializer};

/// What a rank sends: a value, no value, or the reason why its value cannot be written as JSON.
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) enum SentValue<T> {
    Value(T),
    None,
    Invalid(String),
}

impl<'v, T: Serialize> SentValue<&'v T> {
    pub(crate) fn of(value: &'v T) -> Self {
        match value.serialize(FiniteCheck) {
            Ok(()) => Self::Value(value),
            Err(Invalid(why)) => Self::Invalid(why),
        }
    }
}

pub(crate) fn encode<T: Serialize>(value: SentValue<T>) -> Vec<u8> {
    serde_json::to_vec(&value).unwrap_or_else(|error| {
        let invalid = SentValue::<()>::Invalid(error.to_string());
        serde_json::to_vec(&invalid).unwrap_or_default()
    })
}

/// Decodes what `rank` has sent in the exchange `name`.
pub(crate) fn decode<T: DeserializeOwned>(name: &str, rank: usize, bytes: &[u8]) -> Result<T> {
    let why = match serde_json::from_slice(bytes) {
        Ok(SentValue::Value(value)) => return Ok(value),
        Ok(SentValue::None) => format!("rank {rank} has given no value for {name:?}"),
        Ok(SentValue::Invalid(why)) => format!(
            "the value of rank {rank} for {name:?} cannot be sent as JSON: {}",
            nccl_base::sanitize::text(&why)
        ),
        Err(error) => format!(
            "the value of rank {rank} for {name:?} is no {}: {}",
            std::any::type_name::<T>(),
            nccl_base::sanitize::text(&error.to_string())
        ),
    };
    Err(Error::rendezvous(why))
}

/// A serializer that writes nothing. It fails on numbers that are not finite, which `serde_json` writes as `null`.
#[derive(Clone, Copy)]
struct FiniteCheck;

#[derive(Debug)]
struct Invalid(String);

impl Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

impl ser::Error for Invalid {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

type Checked = std::result::Result<(), Invalid>;

/// Serializer methods for values that contain no other values.
macro_rules! plain {
    ($($method:ident: $($type:ty),*;)*) => {
        $(fn $method(self, $(_: $type),*) -> Checked {
            Ok(())
        })*
    };
}

/// Serializer traits of compound values: each element is checked.
macro_rules! compound {
    ($($trait:ident { $($method:ident($($key:ty)?);)* })*) => {
        $(impl ser::$trait for FiniteCheck {
            type Ok = ();
            type Error = Invalid;

            $(fn $method<T: ?Sized + Serialize>(&mut self, $(_: $key,)? value: &T) -> Checked {
                value.serialize(*self)
            })*

            fn end(self) -> Checked {
                Ok(())
            }
        })*
    };
}

compound! {
    SerializeSeq { serialize_element(); }
    SerializeTuple { serialize_element(); }
    SerializeTupleStruct { serialize_field(); }
    SerializeTupleVariant { serialize_field(); }
    SerializeMap { serialize_key(); serialize_value(); }
    SerializeStruct { serialize_field(&'static str); }
    SerializeStructVariant { serialize_field(&'static str); }
}

impl Serializer for FiniteCheck {
    type Ok = ();
    type Error = Invalid;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    plain! {
        serialize_bool: bool;
        serialize_i8: i8;
        serialize_i16: i16;
        serialize_i32: i32;
        serialize_i64: i64;
        serialize_i128: i128;
        serialize_u8: u8;
        serialize_u16: u16;
        serialize_u32: u32;
        serialize_u64: u64;
        serialize_u128: u128;
        serialize_char: char;
        serialize_str: &str;
        serialize_bytes: &[u8];
        serialize_none: ;
        serialize_unit: ;
        serialize_unit_struct: &'static str;
        serialize_unit_variant: &'static str, u32, &'static str;
    }

    fn serialize_f32(self, number: f32) -> Checked {
        self.serialize_f64(number.into())
    }

    fn serialize_f64(self, number: f64) -> Checked {
        match number.is_finite() {
            true => Ok(()),
            false => Err(Invalid(format!("it contains the number {number}"))),
        }
    }

    fn serialize_some<T: ?Sized + Serialize>(self, value: &T) -> Checked {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        value: &T,
    ) -> Checked {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        value: &T,
    ) -> Checked {
        value.serialize(self)
    }

    fn serialize_seq(self, _: Option<usize>) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_tuple(self, _: usize) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_tuple_struct(
        self,
        _: &'static str,
        _: usize,
    ) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_map(self, _: Option<usize>) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> std::result::Result<Self, Invalid> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Setting {
        Off,
        Rate(f32),
        Bounds { low: Option<f64>, high: f64 },
    }

    fn through<T: Serialize + DeserializeOwned>(value: &T) -> Result<T> {
        decode("settings", 3, &encode(SentValue::of(value)))
    }

    #[test]
    fn a_value_arrives_as_it_was_sent() {
        let low = Some(-1.5);
        let names = |name: &str| BTreeMap::from([(1, name.to_owned())]);
        let sent = through(&vec![
            (Setting::Off, names("a")),
            (Setting::Rate(0.25), names("b")),
            (Setting::Bounds { low, high: 2.0 }, names("c")),
        ])
        .unwrap();
        assert_eq!(sent[2].0, Setting::Bounds { low, high: 2.0 });
        assert_eq!(sent[0].1[&1], "a");
        assert_eq!(through(&None::<f64>).unwrap(), None);
    }

    #[test]
    fn numbers_arrive_to_the_last_bit() {
        let mut random = fastrand::Rng::with_seed(7);
        let numbers: Vec<f64> = std::iter::repeat_with(|| f64::from_bits(random.u64(..)))
            .filter(|number| number.is_finite())
            .take(10_000)
            .collect();
        let arrived = through(&numbers).unwrap();
        let bits = |numbers: &[f64]| numbers.iter().map(|one| one.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&arrived), bits(&numbers));
    }

    #[test]
    fn a_value_that_json_has_not_is_an_error_that_names_its_rank() {
        for (bad, shown) in [
            (Setting::Rate(f32::NAN), "NaN"),
            (
                Setting::Bounds {
                    low: Some(f64::INFINITY),
                    high: 1.0,
                },
                "inf",
            ),
        ] {
            let error = through(&vec![bad]).unwrap_err().to_string();
            assert!(error.contains("rank 3") && error.contains(shown), "{error}");
        }
        let keys = BTreeMap::from([((1, 2), 3)]);
        let error = through(&keys).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("key"), "{error}");
        let bytes = encode(SentValue::of(&"text"));
        let error = decode::<u8>("settings", 2, &bytes).unwrap_err().to_string();
        assert!(error.contains("rank 2") && error.contains("u8"), "{error}");
        let error = decode::<u8>("settings", 1, &encode(SentValue::<u8>::None));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("rank 1 has given no value")
        );
    }
}
