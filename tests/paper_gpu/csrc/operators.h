// Operators on tensors of the devices: copies and views here, everything else by the CPU's, on copies in host memory.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "runtime.h"

namespace paper_gpu {

using at::Tensor;

inline std::mutex traffic_lock;
inline std::map<std::string, size_t> traffic;  // bytes, by kind of copy

inline void count(const std::string& kind, size_t nbytes) {
  std::lock_guard<std::mutex> hold(traffic_lock);
  traffic[kind] += nbytes;
}

// A tensor of the host with the same memory, for tasks.
inline Tensor for_tasks(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  return at::from_blob(real(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

class OnDevice {
  int before;

 public:
  explicit OnDevice(int index) : before(exchange_device(index)) {}
  ~OnDevice() { current_device = before; }
};

inline int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device;
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Place = std::optional<c10::Device>;
using Format = std::optional<at::MemoryFormat>;

inline Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, Place place, std::optional<bool> pinned, Format format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(index_of(place));
  return at::detail::empty_generic(size, &DeviceMemory::instance(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, Place place,
                            std::optional<bool>) {
  OnDevice there(index_of(place));
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::instance(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// On the current stream of the device, or of the destination's; only copies of pinned memory leave the host alone.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  Tensor from = source.expand_as(self).resolve_conj().resolve_neg();
  Tensor to_task = for_tasks(self), from_task = for_tasks(from);
  auto copy = [to_task, from_task]() mutable { to_task.copy_(from_task); };
  if (self.is_cuda() && from.is_cuda()) {
    auto& there = queue(self.get_device());
    if (self.get_device() == from.get_device()) {
      there.put(copy);
    } else {  // on the source's stream, for which the destination's waits
      auto& here = queue(from.get_device());
      uint64_t before = there.last(), done = here.put([&there, before, copy]() mutable {
        there.wait(before);
        copy();
      });
      there.put([&here, done] { here.wait(done); }, false);
    }
    return self;
  }
  const Tensor& host = self.is_cuda() ? from : self;
  auto& stream = queue(self.is_cuda() ? self.get_device() : from.get_device());
  // With a cast, or in another order, CUDA goes through a temporary in pageable memory.
  bool is_plain = self.scalar_type() == from.scalar_type() && self.is_non_overlapping_and_dense() &&
                  self.strides() == from.strides();
  bool is_pinned = is_plain && PinnedMemory::instance().holds(host.data_ptr());
  count(std::string(self.is_cuda() ? "to the device, " : "to the host, ") + (is_pinned ? "pinned" : "pageable"),
        self.nbytes());
  uint64_t done = stream.put(copy);
  if (is_pinned && non_blocking) {
    PinnedMemory::instance().note_use(host.data_ptr(), {&stream, done});
  } else {
    WithoutGil waiting;
    stream.wait(done);
  }
  return self;
}

inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor destination = to;
  copy_(destination, self, non_blocking);
  return to;
}

inline void grow(c10::StorageImpl* storage, size_t nbytes) {
  int index = storage->device().index();
  auto fresh = DeviceMemory::instance().allocate_on(index, nbytes);
  if (size_t kept = std::min(nbytes, storage->nbytes())) {
    char *to = real(fresh.get()), *from = real(storage->data());
    auto& stream = queue(index);
    stream.wait(stream.put([=] { memcpy(to, from, kept); }, false));
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

inline void ensure_room(const Tensor& self) {
  if (!self.numel()) return;
  size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(),
                                                   self.storage_offset());
  if (needed > self.storage().nbytes()) grow(self.storage().unsafeGetStorageImpl(), needed);
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, Format format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  ensure_room(self);
  return self;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (!to.sizes().equals(self.sizes())) resize_(to, self.sizes(), {});
  return copy_from(self, to, false);
}

inline Tensor& set_whole(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size,
                         at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  ensure_room(self);
  return self;
}

inline Tensor& set_storage(Tensor& self, c10::Storage storage) {
  int64_t numel = storage.nbytes() / self.dtype().itemsize();
  return set_whole(self, std::move(storage), 0, {numel}, {});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_whole(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_nothing(Tensor& self) {
  auto& memory = DeviceMemory::instance();
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory.allocate_on(self.get_device(), 0), &memory, true);
  return set_whole(self, none, 0, {0}, {});
}

inline bool is_set_to(const Tensor& one, const Tensor& other) {
  return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
         one.strides() == other.strides();
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  DeviceMemory::instance().recordStream(self.storage().data_ptr(), stream);
}

inline at::Scalar local_scalar(const Tensor& self) { return self.to(c10::kCPU).item(); }

inline Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

// Any other operator: as strict about devices as CUDA's.
inline void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> takes_host_tensors{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::to", "aten::_to_copy"};
  auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  auto first = stack->size() - schema.arguments().size();
  int index = -1;
  bool has_host_tensor = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    has_host_tensor |= tensor.is_cpu() && tensor.dim() > 0;
    if (!tensor.is_cuda()) return;
    TORCH_CHECK(index < 0 || index == tensor.get_device(), "Expected all tensors to be on the same device, but ",
                schema.name(), " got at least two devices, cuda:", index, " and cuda:", (int)tensor.get_device());
    index = tensor.get_device();
  };
  for (auto& each : arguments) {
    if (each.isTensor()) {
      look(each.toTensor());
    } else if (each.isTensorList()) {
      for (auto& tensor : each.toTensorVector()) look(tensor);
    }
  }
  TORCH_CHECK(!has_host_tensor || index < 0 || takes_host_tensors.count(schema.name()),
              "Expected all tensors to be on the same device, but ", schema.name(), " got cuda and cpu");
  OnDevice there(index < 0 ? current_device : index);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& argument = (*stack)[first + i];
    if (schema.arguments()[i].name() == "generator" && argument.isNone()) argument = generator(current_device);
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Storage_storage_offset", set_whole);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("is_set_to", is_set_to);
}

}  // namespace paper_gpu
