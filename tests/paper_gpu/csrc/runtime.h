// What torch asks of a kind of devices: the current one, streams and events, and whether there is CUDA at all.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "pinned.h"

namespace paper_gpu {

inline at::Generator& generator(int index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < DEVICES; ++i) made->push_back(at::detail::createCPUGenerator(1234));
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

inline int exchange_device(int index) {
  int old = current_device;
  current_device = index;
  return old;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return is_forked ? 0 : DEVICES; }

  c10::Device getDevice() const override { return {CUDA, (c10::DeviceIndex)current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {CUDA, (c10::DeviceIndex)exchange_device(device.index())};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "CUDA error: invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronise(index); }

  static c10::Stream stream(c10::Device device, int64_t id) {
    int index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, index), id);
  }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, stream_of(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, new_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  static Queue& queue_of(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    auto& asked = queue_of(stream);
    return asked.has_done(asked.last());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    WithoutGil waiting;
    auto& asked = queue_of(stream);
    asked.wait(asked.last());
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    DeviceMemory::instance().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    auto& recorded = queue_of(stream);
    *(Mark*)*event = {&recorded, recorded.last()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queue_of(stream).put([mark = *(Mark*)event] { mark.wait(); }, false);
  }
  bool queryEvent(void* event) const override { return !event || ((Mark*)event)->is_done(); }
  void synchronizeEvent(void* event) const override {
    WithoutGil waiting;
    if (event) ((Mark*)event)->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Mark*)event; }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};

inline c10::impl::DeviceGuardImplRegistrar guard_registered(CUDA, new Guard);

}  // namespace paper_gpu

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return paper_gpu::DEVICES > 0; }
  bool isAvailable() const override { return paper_gpu::DEVICES > 0; }
  int getNumGPUs() const override { return paper_gpu::DEVICES; }
  DeviceIndex deviceCount() const override { return paper_gpu::DEVICES; }
  bool hasPrimaryContext(DeviceIndex index) const override { return paper_gpu::devices()[index].has_context; }

  DeviceIndex current_device() const override { return paper_gpu::current_device; }
  DeviceIndex getCurrentDevice() const override { return paper_gpu::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { paper_gpu::Guard().setDevice({paper_gpu::CUDA, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return paper_gpu::exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? paper_gpu::current_device : paper_gpu::exchange_device(index);
  }
  void deviceSynchronize(DeviceIndex index) const override { paper_gpu::synchronise(index); }

  const Generator& getDefaultGenerator(DeviceIndex index) const override { return paper_gpu::generator(index); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  Device getDeviceFromPtr(void* pointer) const override {
    int index = paper_gpu::device_of(pointer);
    TORCH_CHECK(index >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return {paper_gpu::CUDA, (DeviceIndex)index};
  }
  bool isPinnedPtr(const void* pointer) const override { return paper_gpu::PinnedMemory::instance().holds(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &paper_gpu::PinnedMemory::instance(); }
  Allocator* getCUDADeviceAllocator() const override { return &paper_gpu::DeviceMemory::instance(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
