-- The status: the model, the time of its last answer, and why nothing is suggested. For any status line:
--   %{v:lua.require'keystroke'.status()}
--
-- A change fires the autocommand event `User KeystrokeStatus`.

local keystroke = require('keystroke')

local M = { model = '', took = '', speed = '', reason = '' }
local QUIET = { superseded = true, stale_version = true, cancelled = true }

--- The server answered a request for ghost text: fetch its receipt.
function M.answered(buffer)
  keystroke.request(buffer, 'keystroke/receipt', { uri = vim.uri_from_bufnr(buffer) }, function(_, paid)
    if not paid or not paid.total_ms or QUIET[paid.reason or ''] then
      return
    end
    M.model = paid.model ~= '' and paid.model or M.model
    M.took = string.format('%.0f ms', paid.total_ms)
    if paid.output_tokens > 1 and paid.decode_ms > 0 then
      M.speed = string.format('%.0f tok/s', paid.output_tokens / paid.decode_ms * 1000)
    end
    M.reason = (paid.reason or ''):gsub('_', ' ')
    vim.api.nvim_exec_autocmds('User', { pattern = 'KeystrokeStatus', modeline = false })
  end)
end

function M.text()
  if not keystroke.client() then
    return 'not here'
  elseif not keystroke.config.ghost_text then
    return 'off'
  end
  local parts = { M.model ~= '' and M.model or 'ready', M.speed, M.took, M.reason ~= '' and '(' .. M.reason .. ')' or '' }
  return table.concat(vim.tbl_filter(function(part) return part ~= '' end, parts), ' ')
end

return M
