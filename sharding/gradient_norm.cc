#include "fullshard/sharding/gradient_norm.h"

#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/linalg_vector_norm.h"

namespace fullshard::internal {

double norm_by_rows(const at::Tensor& values, double p) {
  constexpr int64_t kRow = 1024;
  const int64_t whole = values.numel() / kRow * kRow;
  const at::ScalarType dtype =
      values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (values.numel() == 0) return 0;
  std::vector<at::Tensor> norms;  // Infinite p takes no empty tensor.
  if (whole > 0) {
    norms.push_back(at::linalg_vector_norm(
        values.narrow(0, 0, whole).view({-1, kRow}), p, {1}, false, dtype));
  }
  if (whole < values.numel()) {
    norms.push_back(at::linalg_vector_norm(
        values.narrow(0, whole, values.numel() - whole), p, {}, true, dtype));
  }
  return at::linalg_vector_norm(at::cat(norms).to(at::kDouble), p)
      .item<double>();
}

}  // namespace fullshard::internal
