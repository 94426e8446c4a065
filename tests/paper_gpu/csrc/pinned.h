// Page-locked memory of the host, in powers of two and never given back to the system, as torch's allocator does it.
//
// A freed block is given out again once the copies out of it and into it are done.
#pragma once

#include <c10/core/Allocator.h>

#include <cstring>

#include "device.h"

namespace paper_gpu {

class PinnedMemory final : public at::Allocator {
  struct Locked {
    size_t size;
    Uses uses;
  };
  std::mutex lock;
  std::map<char*, Locked> used;
  std::map<size_t, std::vector<std::pair<char*, Uses>>> free;

 public:
  size_t locked = 0, in_use = 0;  // bytes

  static PinnedMemory& instance() {
    static auto* one = new PinnedMemory;
    return *one;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device host(c10::kCPU);
    if (!nbytes) return {nullptr, nullptr, &release, host};
    device(current_device);  // pages are locked through the context of a device
    size_t size = 4096;
    while (size < nbytes) size *= 2;
    std::lock_guard<std::mutex> hold(lock);
    char* at = take_free(size);
    if (!at) {
      at = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "CUDA error: out of memory");
      locked += size;
    }
    memset(at, 0xFF, size);
    used[at] = {size, {}};
    in_use += size;
    return {at, at, &release, host};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    return find(pointer);
  }

  // A copy from or to this memory is under way until `mark`.
  void note_use(const void* pointer, Mark mark) {
    std::lock_guard<std::mutex> hold(lock);
    if (auto* found = find(pointer)) found->uses.add(mark);
  }

 private:
  static void release(void* pointer) {
    auto& memory = instance();
    std::lock_guard<std::mutex> hold(memory.lock);
    auto node = memory.used.extract((char*)pointer);
    if (!node) return;
    memory.in_use -= node.mapped().size;
    memory.free[node.mapped().size].emplace_back((char*)pointer, node.mapped().uses);
  }

  char* take_free(size_t size) {
    auto& blocks = free[size];
    auto found = std::find_if(blocks.begin(), blocks.end(), [](auto& each) { return each.second.are_done(); });
    if (found == blocks.end()) return nullptr;
    char* at = found->first;
    blocks.erase(found);
    return at;
  }

  Locked* find(const void* pointer) {
    auto found = used.upper_bound((char*)pointer);
    if (found == used.begin()) return nullptr;
    --found;
    return (const char*)pointer < found->first + found->second.size ? &found->second : nullptr;
  }
};

}  // namespace paper_gpu
