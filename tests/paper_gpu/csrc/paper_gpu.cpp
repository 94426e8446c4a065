// The module that Python sees. One translation unit: nearly all of the time to compile goes into torch's headers.
#include <torch/extension.h>

#include "collectives.h"

namespace py = pybind11;
using namespace paper_gpu;

static Pointer<ProcessGroup> make_group(Pointer<c10d::Store> store, int rank, int size, Pointer<Options> options) {
  auto make_gloo = py::module::import("torch.distributed").attr("ProcessGroupGloo");
  auto gloo = make_gloo(store, rank, size, py::arg("timeout") = py::cast(options->timeout));
  return c10::make_intrusive<ProcessGroup>(store, rank, size, options, gloo.cast<Pointer<c10d::Backend>>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(CUDA, &DeviceMemory::instance(), 100);

  py::class_<Options, c10d::Backend::Options, Pointer<Options>>(module, "Options", py::dynamic_attr())
      .def(py::init([](bool is_high) {
             auto made = c10::make_intrusive<Options>();
             made->is_high_priority_stream = is_high;
             return made;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("split_from", &Options::split_from)
      .def_readwrite("split_color", &Options::split_color)
      .def_readwrite("config", &Options::config);
  py::class_<ProcessGroup, c10d::Backend, Pointer<ProcessGroup>>(module, "ProcessGroupNCCL")
      .def(py::init(&make_group))
      .def_property_readonly("uid", [](ProcessGroup&) { return 0; });

  module.def("device_count", [] { return is_forked ? 0 : DEVICES; });
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int index) {
    device(index);
    current_device = index;
  });
  module.def("synchronize", &synchronise);
  module.def("current_stream_id", &stream_of);
  module.def("generator", &generator);
  module.def("is_forked", [] { return is_forked; });
  module.def("capacity", [] { return CAPACITY; });
  module.def("empty_cache", [] { DeviceMemory::instance().emptyCache({0, 0}); });
  module.def("reset_peak", [](int index) { DeviceMemory::instance().resetPeakStats(index); });
  module.def("memory", [](int index) {
    auto& one = device(index);
    std::lock_guard<std::mutex> hold(one.lock);
    return std::map<std::string, size_t>{{"allocated", one.allocated}, {"peak", one.peak}, {"reserved", one.reserved}};
  });
  module.def("resize_storage", [](const Tensor& tensor, size_t nbytes) {
    grow(tensor.storage().unsafeGetStorageImpl(), nbytes);
  });

  // For tests.
  module.def("hold", [](int index) { queue(index).put([] { Held::instance().wait(); }); });
  module.def("release", [] { Held::instance().release(); });
  module.def("contexts", [] {
    std::vector<int> found;
    for (int index = 0; index < DEVICES; ++index)
      if (devices()[index].has_context) found.push_back(index);
    return found;
  });
  module.def("pinned", [] {
    auto& memory = PinnedMemory::instance();
    return std::map<std::string, size_t>{{"in use", memory.in_use}, {"locked", memory.locked}};
  });
  module.def("traffic", [] {
    std::lock_guard<std::mutex> hold(traffic_lock);
    return traffic;
  });
  module.def("faults", [] {
    std::lock_guard<std::mutex> hold(faults_lock);
    return faults;
  });
}
