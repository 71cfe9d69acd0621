//! Element types by the names that nccl-tests gives them.

/// An element type of NCCL, as `-d` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// nccl-tests' name, as printed in the `type` column.
    pub name: &'static str,
    /// The size of one element in bytes.
    pub size: usize,
    /// NCCL's code (`ncclDataType_t`).
    pub code: u32,
}

/// `float`, the default.
pub const FLOAT: Element = Element {
    name: "float",
    size: 4,
    code: 7,
};

/// All types, in nccl-tests' order, which is NCCL's.
pub const ALL: [Element; 12] = [
    Element {
        name: "int8",
        size: 1,
        code: 0,
    },
    Element {
        name: "uint8",
        size: 1,
        code: 1,
    },
    Element {
        name: "int32",
        size: 4,
        code: 2,
    },
    Element {
        name: "uint32",
        size: 4,
        code: 3,
    },
    Element {
        name: "int64",
        size: 8,
        code: 4,
    },
    Element {
        name: "uint64",
        size: 8,
        code: 5,
    },
    Element {
        name: "half",
        size: 2,
        code: 6,
    },
    FLOAT,
    Element {
        name: "double",
        size: 8,
        code: 8,
    },
    Element {
        name: "bfloat16",
        size: 2,
        code: 9,
    },
    Element {
        name: "f8e4m3",
        size: 1,
        code: 10,
    },
    Element {
        name: "f8e5m2",
        size: 1,
        code: 11,
    },
];

impl Element {
    /// The type that nccl-tests calls `name`.
    ///
    /// ```
    /// use nccl_tools::element::Element;
    /// assert_eq!(Element::named("bfloat16").unwrap().size, 2);
    /// assert_eq!(Element::named("bf16"), None);
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        ALL.into_iter().find(|element| element.name == name)
    }

    /// Whether this is one of the 8-bit floats, which NCCL has since 2.24 and GPUs since compute
    /// capability 9.0.
    #[must_use]
    pub fn is_float8(self) -> bool {
        self.code == 10 || self.code == 11
    }
}
