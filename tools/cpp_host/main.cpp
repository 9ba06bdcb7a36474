// Runs a package, a file from versatil_core.package(), without Python:
//
//   cpp_host model.pt2 result 4x3x8x8:images.bin
//
// reads each input, in the order of the manifest, from a file of raw values, and writes
// result.0.bin, result.1.bin and so on. A package is native code: run only what you trust.

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Json = nlohmann::json;
using Symbols = std::map<std::string, std::int64_t>;  // the dynamic sizes of this call

std::string reason(const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);
    return torchs ? torchs->what_without_backtrace() : error.what();
}

Json read_manifest(const std::string& path) {
    try {
        caffe2::serialize::PyTorchStreamReader reader(path);
        const auto [data, size] = reader.getRecord("extra/versatil_manifest.json");
        const auto* text = static_cast<const char*>(data.get());
        return Json::parse(text, text + size);
    } catch (const std::exception& error) {
        TORCH_CHECK(false, path,
                    " is missing, damaged, or not from versatil_core.package(): ", reason(error));
    }
}

// Refuses what this program cannot run, before any code of the package is loaded.
void check_package(const std::string& path, const Json& manifest) {
    TORCH_CHECK(manifest.at("format_version") == 2, path, " has the format version ",
                manifest["format_version"], ", and this program reads 2");
    TORCH_CHECK(manifest.at("kind") == "package", path,
                " is a portable file: package it with versatil_core.package()");
    const std::string torch = manifest.at("written_with").at("torch");
    const auto minor = c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR, ".");
    TORCH_CHECK(torch.rfind(minor, 0) == 0, path, " was packaged with torch ", torch,
                ", and this program was built with ", TORCH_VERSION);
    const Json& package = manifest.at("package");
    // Every word of it; what names an instruction set there stands for nothing else.
    std::ifstream file("/proc/cpuinfo");
    const std::set<std::string> here{std::istream_iterator<std::string>(file), {}};
    for (const Json& feature : package.at("cpu_features"))
        TORCH_CHECK(here.count(feature), path, " is for ", package.at("machine"), " with ", feature,
                    ", which this CPU lacks");
}

void check_sizes(const Json& spec, at::IntArrayRef sizes, Symbols& symbols) {
    const Json& expected = spec.at("shape");
    bool fits = sizes.size() == expected.size();
    for (std::size_t dim = 0; fits && dim < sizes.size(); ++dim) {
        const Json& size = expected[dim];
        const auto given = sizes[dim];
        // A number is fixed; a size that varies has a symbol, a minimum, and a maximum or null.
        fits = size.is_number()
                   ? given == size
                   : given >= size.at("minimum") &&
                         (size.at("maximum").is_null() || given <= size["maximum"]) &&
                         symbols.emplace(size.at("symbol"), given).first->second == given;
    }
    TORCH_CHECK(fits, "input ", spec.at("name"), ": got the sizes ", sizes, ", expected ",
                expected);
}

// Native code trusts its caller: a tensor of another size or dtype would be read beyond its end.
at::Tensor read_input(const Json& spec, const std::string& argument, Symbols& symbols) {
    const auto colon = argument.find(':');
    auto text = argument.substr(0, colon);
    const bool is_input =
        colon != std::string::npos && text.find_first_not_of("0123456789x") == std::string::npos;
    TORCH_CHECK(is_input, argument, " is no input: give sizes and a file, as in 4x3x8x8:input.bin");
    std::replace(text.begin(), text.end(), 'x', ' ');
    std::istringstream words(text);
    const std::vector<std::int64_t> sizes{std::istream_iterator<std::int64_t>(words), {}};
    check_sizes(spec, sizes, symbols);
    const auto dtype = spec.at("dtype").get<std::string>().substr(std::string("torch.").size());
    const at::Tensor tensor = at::empty(sizes, c10::getStringToDtypeMap().at(dtype));  // contiguous
    const auto path = argument.substr(colon + 1);
    const auto bytes = std::filesystem::file_size(path);
    TORCH_CHECK(bytes == tensor.nbytes(), path, " has ", bytes, " bytes, expected ",
                tensor.nbytes(), ": ", dtype, " ", tensor.sizes());
    std::ifstream file(path, std::ios::binary);
    file.read(static_cast<char*>(tensor.mutable_data_ptr()), bytes);
    TORCH_CHECK(file, path, " cannot be read");
    return tensor;
}

void write_result(const std::string& path, const at::Tensor& result) {
    const at::Tensor plain = result.contiguous();
    std::ofstream file(path + ".part", std::ios::binary);
    file.write(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
    file.close();
    TORCH_CHECK(file, path, " cannot be written");
    std::filesystem::rename(path + ".part", path);
    std::cout << path << ": " << c10::getDtypeNames(plain.scalar_type()).first << " "
              << plain.sizes() << "\n";
}

void run(const std::string& path, const std::string& output, std::vector<std::string> given) {
    const Json manifest = read_manifest(path);
    check_package(path, manifest);
    std::vector<Json> specs;
    for (const Json& spec : manifest.at("info").at("inputs"))
        if (!spec.at("shape").is_null()) specs.push_back(spec);  // a constant is part of the code
    TORCH_CHECK(given.size() == specs.size(), path, " takes ", specs.size(), " inputs, got ",
                given.size());
    const c10::InferenceMode without_gradients;
    std::vector<at::Tensor> inputs;
    Symbols symbols;
    for (std::size_t i = 0; i < specs.size(); ++i)
        inputs.push_back(read_input(specs[i], given[i], symbols));
    torch::inductor::AOTIModelPackageLoader model(path);
    const auto results = model.run(inputs);
    for (std::size_t i = 0; i < results.size(); ++i)
        write_result(c10::str(output, ".", i, ".bin"), results[i]);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::cerr << "usage: cpp_host model.pt2 result [4x3x8x8:input.bin ...]\n";
        return 2;
    }
    try {
        run(argv[1], argv[2], {argv + 3, argv + argc});
    } catch (const std::exception& error) {
        std::cerr << "cpp_host: " << reason(error) << "\n";
        return 1;
    }
}
