//! Which of the frames of an allocation a person wants to see.
//!
//! Nothing is thrown away: the page and the snapshot keep whole stacks. These rules only choose the one line that names a holder.

use std::collections::HashMap;

use super::model::{FrameId, Names, Origin, StackId};

/// Parts of C++ names that tell how memory was taken, not what for.
const INNER: &[&str] = &[
    "torch::unwind",
    "CapturedTraceback",
    "gather_with_cpp",
    "CUDACachingAllocator",
    "empty_",
    "create_out",
    "set_output",
    "wrap_kernel_functor",
    "wrapper_CUDA",
    "wrapper_Composite",
    "TensorIteratorBase",
    "StorageImpl",
    "::redispatch(",
    "at::meta::",
    "VariableType::",
    "resize_",
];

/// The innermost frame that tells an operation: not the allocator, the capture of frames, the making of an empty tensor or a
/// dispatch layer. `None` for the empty stack.
pub fn operation(names: &Names, stack: StackId) -> Option<FrameId> {
    let frames = names.stack(stack);
    let outer = |id: &&FrameId| {
        let name = names.text(names.frame(**id).name);
        !INNER.iter().any(|part| name.contains(part))
    };
    frames.iter().find(outer).or(frames.first()).copied()
}

/// The frame that names the holder of a block: the innermost frame of the user's Python code, else the innermost Python frame;
/// on threads without Python (autograd's backward) the innermost backward node, else the operation. `None` for the empty stack.
pub fn holder(names: &Names, stack: StackId) -> Option<FrameId> {
    let frames = names.stack(stack);
    let mut library = None;
    for id in frames {
        match names.origin(*id) {
            Origin::User => return Some(*id),
            Origin::Library if library.is_none() => library = Some(*id),
            _ => {}
        }
    }
    library.or_else(|| {
        let backward = frames.iter().find(|id| names.text(names.frame(**id).name).contains("autograd::generated::"));
        backward.copied().or_else(|| operation(names, stack))
    })
}

/// [`holder`] and its description, remembered for each stack.
#[derive(Debug)]
pub struct Holders<'n> {
    names: &'n Names,
    known: HashMap<StackId, Option<FrameId>>,
}

impl<'n> Holders<'n> {
    /// For the stacks of `names`.
    pub fn new(names: &'n Names) -> Self {
        Holders { names, known: HashMap::new() }
    }

    /// See [`holder`].
    pub fn of(&mut self, stack: StackId) -> Option<FrameId> {
        let names = self.names;
        *self.known.entry(stack).or_insert_with(|| holder(names, stack))
    }

    /// The description of the holder, such as `train (train.py:12)`.
    pub fn text(&mut self, stack: StackId) -> Option<String> {
        self.of(stack).map(|frame| describe(self.names, frame))
    }
}

/// A frame as text; a C++ name loses its arguments.
pub fn describe(names: &Names, id: FrameId) -> String {
    let text = names.describe(id);
    if names.origin(id) != Origin::Native {
        return text;
    }
    match text.find('(') {
        // `(anonymous namespace)` and operator() are part of the name.
        Some(at) if at > 0 && !text[at..].starts_with("(anonymous") && !text[..at].ends_with("operator") => text[..at].to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Frame;
    use super::*;

    #[test]
    fn the_holder_is_own_code_then_a_library_then_a_backward_node_then_the_operation() {
        let mut names = Names::default();
        let mut frame = |name: &str, file: &str, line| {
            let (name, file) = (names.intern(name), names.intern(file));
            names.intern_frame(Frame { name, file, line })
        };
        let unwind = frame("torch::unwind::unwind()", "??", 0);
        let empty = frame("at::detail::empty_cuda(c10::ArrayRef<long>)", "??", 0);
        let bmm = frame("at::_ops::bmm::call(at::Tensor const&)", "??", 0);
        let node = frame("torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)", "Functions.cpp", 0);
        let library = frame("forward", "/e/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125);
        let own = frame("train", "/home/me/train.py", 12);
        let mut stack = |frames: &[FrameId]| names.intern_stack(frames);
        let (all, packaged, backward, native, nothing) = (
            stack(&[unwind, empty, bmm, library, own]),
            stack(&[unwind, empty, bmm, library]),
            stack(&[unwind, empty, bmm, node]),
            stack(&[unwind, empty, bmm]),
            stack(&[unwind]),
        );
        let said = |stack| describe(&names, holder(&names, stack).unwrap());
        assert_eq!(said(all), "train (/home/me/train.py:12)");
        assert_eq!(said(packaged), "forward (/e/lib/python3.11/site-packages/torch/nn/modules/linear.py:125)");
        assert_eq!(said(backward), "torch::autograd::generated::BmmBackward0::apply");
        assert_eq!(said(native), "at::_ops::bmm::call");
        assert_eq!(said(nothing), "torch::unwind::unwind");
        assert_eq!(holder(&names, StackId::EMPTY), None);
    }
}
