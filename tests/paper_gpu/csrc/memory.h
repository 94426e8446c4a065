// Memory of the devices: a caching allocator, which gives freed memory out again at once, on the stream that had it.
//
// New memory is full of NaN (0xFF). Sizes are rounded as CUDA's allocator rounds small ones, to 512 bytes; a freed
// block serves requests down to four fifths of its size. What is reserved grows as with CUDA, by segments: of 2 MiB for
// blocks up to 1 MiB, of 20 MiB for those below 10 MiB, of their size rounded to 2 MiB for larger ones. A segment is
// given back when all of its blocks are free. Unlike CUDA's, free neighbours do not become one block.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "device.h"

namespace paper_gpu {

inline void release(void* pointer);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& instance() {
    static auto* one = new DeviceMemory;
    return *one;
  }

  c10::DataPtr allocate_on(int index, size_t nbytes) {
    auto& one = device(index);
    c10::Device where(CUDA, index);
    if (!nbytes) return {nullptr, nullptr, &release, where};
    size_t size = (nbytes + 511) / 512 * 512;
    int64_t stream = stream_of(index);
    char* at = nullptr;
    {
      std::lock_guard<std::mutex> hold(one.lock);
      collect(one);
      at = take_free(one, stream, size);
      if (!at) {
        TORCH_CHECK_WITH(OutOfMemoryError, one.allocated + size <= CAPACITY, "CUDA out of memory. Tried to allocate ",
                         size, " bytes; ", one.allocated, " of ", CAPACITY, " are in use");
        at = cut(one, stream, size);
      }
      segment_of(one, at).in_use += 1;
      one.blocks[at] = {size, stream, {}};
      one.allocated += size;
      one.peak = std::max(one.peak, one.allocated);
    }
    queue(index).put([memory = real(at), size] { memset(memory, 0xFF, size); }, false);
    return {at, at, &release, where};
  }

  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(current_device, nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  bool initialized() override { return true; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    synchronise(current_device);
    memcpy(real(to), real(from), nbytes);
  }

  void emptyCache(c10::MempoolId_t) override {
    for (int index = 0; index < DEVICES; ++index) {
      auto& one = devices()[index];
      if (!one.has_context) continue;
      synchronise(index);
      std::lock_guard<std::mutex> hold(one.lock);
      for (auto& [key, pointers] : one.free) {
        auto is_whole = [&](char* at) { return !segment_of(one, at).in_use; };
        pointers.erase(std::remove_if(pointers.begin(), pointers.end(), is_whole), pointers.end());
      }
      for (auto found = one.segments.begin(); found != one.segments.end();) {
        auto& [at, segment] = *found;
        if (segment.in_use) {
          ++found;
          continue;
        }
        one.reserved -= segment.size;
        madvise(real(at), segment.size, MADV_DONTNEED);
        for (auto open = one.open.begin(); open != one.open.end();)
          open = open->second == at ? one.open.erase(open) : std::next(open);
        found = one.segments.erase(found);
      }
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get()) return;
    auto& one = device(stream.device_index());
    std::lock_guard<std::mutex> hold(one.lock);
    auto found = one.blocks.find((char*)pointer.get());
    if (found != one.blocks.end() && found->second.stream != stream.id()) found->second.used_on.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& one = device(index);
    std::lock_guard<std::mutex> hold(one.lock);
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = one.allocated;
    stats.allocated_bytes[0].peak = stats.active_bytes[0].peak = one.peak;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = one.reserved;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex index) override {
    auto& one = device(index);
    std::lock_guard<std::mutex> hold(one.lock);
    one.peak = one.allocated;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    auto& one = device(index);
    std::lock_guard<std::mutex> hold(one.lock);
    return {CAPACITY - one.reserved, CAPACITY};
  }

  static Device::Segment& segment_of(Device& one, char* at) { return std::prev(one.segments.upper_bound(at))->second; }

 private:
  // A new block, of a segment of this stream that has room, or of a new one.
  static char* cut(Device& one, int64_t stream, size_t size) {
    constexpr size_t MIB = 1 << 20, SMALL = 2 * MIB, LARGE = 20 * MIB;
    size_t whole = size <= MIB ? SMALL : size < 10 * MIB ? LARGE : (size + SMALL - 1) / SMALL * SMALL;
    std::pair<int64_t, size_t> kind{stream, size < 10 * MIB ? whole : 0};
    auto open = one.open.find(kind);
    if (open == one.open.end() || one.segments.at(open->second).cut + size > whole || !kind.second) {
      char* at = one.shown + one.next;
      one.next += whole;
      one.reserved += whole;
      one.segments[at] = {whole, 0, 0};
      open = one.open.insert_or_assign(kind, at).first;
    }
    auto& segment = one.segments.at(open->second);
    char* at = open->second + segment.cut;
    segment.cut += size;
    return at;
  }

  // Memory that other streams used becomes free when they have passed the place where it was freed.
  static void collect(Device& one) {
    auto is_free = [&](Device::Leaving& each) {
      if (!each.uses.are_done()) return false;
      segment_of(one, each.at).in_use -= 1;
      one.free[{each.block.stream, each.block.size}].push_back(each.at);
      return true;
    };
    one.leaving.erase(std::remove_if(one.leaving.begin(), one.leaving.end(), is_free), one.leaving.end());
  }

  static char* take_free(Device& one, int64_t stream, size_t& size) {
    for (auto found = one.free.lower_bound({stream, size}); found != one.free.end(); ++found) {
      auto& [key, pointers] = *found;
      if (key.first != stream || key.second > size + size / 4) break;
      if (pointers.empty()) continue;
      size = key.second;
      char* at = pointers.back();
      pointers.pop_back();
      return at;
    }
    return nullptr;
  }
};

inline void release(void* pointer) {
  int index = pointer && !is_forked ? device_of(pointer) : -1;
  if (index < 0) return;
  auto& one = devices()[index];
  std::lock_guard<std::mutex> hold(one.lock);
  auto node = one.blocks.extract((char*)pointer);
  auto& block = node.mapped();
  one.allocated -= block.size;
  if (block.used_on.empty()) {
    DeviceMemory::segment_of(one, (char*)pointer).in_use -= 1;
    one.free[{block.stream, block.size}].push_back((char*)pointer);
    return;
  }
  Uses uses;
  for (auto stream : block.used_on) uses.add({one.streams.at(stream), one.streams.at(stream)->last()});
  one.leaving.push_back({(char*)pointer, block, uses});
}

}  // namespace paper_gpu
